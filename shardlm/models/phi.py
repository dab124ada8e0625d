"""Phi-3 and 3.5 (https://arxiv.org/abs/2404.14219): Llama's decoder with fused projections and longrope."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, fused, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` phi3."""
    options.only("full_attn_mod", 1)
    options.only("interpolate_factor", 1)
    options.only("lm_head_bias", False)
    windows = hf_decoder.sliding(options, lambda layer: True)
    feed_forward = hf_decoder.mlp(options)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(hf_decoder.attention(options, length, window=windows[layer]), feed_forward)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    attention, found = block.attention, standard()
    kv = attention.num_kv_heads * attention.head_dim
    sizes = {"attention.wq": attention.num_heads * attention.head_dim, "attention.wk": kv, "attention.wv": kv}
    found |= fused(found, f"{LAYER}self_attn.qkv_proj.weight", sizes)
    return found | fused_gate(found, block.mlp.mlp_dim)


def fused_gate(found: Names, mlp_dim: int) -> Names:
    """Gate and up as one matrix."""
    return fused(found, f"{LAYER}mlp.gate_up_proj.weight", {"mlp.gate": mlp_dim, "mlp.up": mlp_dim})
