"""VaultGemma (https://arxiv.org/abs/2510.15001): Gemma 2's decoder with norms before each layer alone."""

from shardlm.layers.block import BlockConfig
from shardlm.models import gemma
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` vaultgemma."""
    options.where_absent(attn_logit_softcapping=50.0, final_logit_softcapping=30.0, sliding_window=4096)
    return gemma.from_hf(options, length)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard(mlp_norm="pre_feedforward_layernorm")
