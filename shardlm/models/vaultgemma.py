"""VaultGemma (https://arxiv.org/abs/2510.15001): Gemma 2's decoder with norms before each layer alone."""

from shardlm.layers.block import BlockConfig
from shardlm.models.gemma import from_hf as from_hf  # `model_type` vaultgemma
from shardlm.models.naming import Names, standard
from shardlm.models.transformer import TransformerConfig


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard(mlp_norm="pre_feedforward_layernorm")
