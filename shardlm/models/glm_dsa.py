"""GLM-5 (https://arxiv.org/abs/2602.15763): DeepSeek V3.2 with other sizes, an indexer that is rotated as latent
attention is, and layers that attend to what the indexer of one before them chose."""

from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek
from shardlm.models.deepseek_sparse import from_hf as from_hf  # `model_type` glm_moe_dsa
from shardlm.models.deepseek_sparse import indexer_names
from shardlm.models.naming import Names
from shardlm.models.transformer_config import TransformerConfig


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return deepseek.names(config, block) | indexer_names(block.attention.indexer, interleaved=True)
