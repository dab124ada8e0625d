"""GLM-4 (https://arxiv.org/abs/2406.12793): half of each head rotated in adjacent pairs, a fused gate; GLM-4 0414 has
norms before and after each layer besides."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, in_pairs, standard
from shardlm.models.phi import fused_gate
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` glm and glm4."""
    attention = hf_decoder.attention(options, length, partial=0.5, out_bias=False)
    norms = "both" if options("model_type") == "glm4" else "pre"
    block = BlockConfig(attention, hf_decoder.mlp(options), norms=norms)
    return hf_decoder.decoder(options, lambda layer: block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
    rotated = block.attention.rope.dim or block.attention.head_dim
    return found | in_pairs(found, rotated) | fused_gate(found, block.mlp.mlp_dim)
