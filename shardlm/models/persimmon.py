"""Persimmon (https://www.adept.ai/blog/persimmon-8b): layer norms, of each head of queries and keys too, squared ReLU
without a gate, a rotation of half of each head, biases."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, fused_by_head, layer_norms, linear, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` persimmon."""
    options.aside("hidden_dropout", "rms_norm_eps")  # of training; of norms that it has none of
    options.where_absent(hidden_act="relu2")
    norm = NormConfig("layer", options("layer_norm_eps", 1e-5))
    own = {"bias": True, "out_bias": True, "norm": norm}
    own["qk_norm"] = "head" if options("qk_layernorm", True) else "none"
    attention = hf_decoder.attention(options, length, partial=0.5, **own)
    block = BlockConfig(attention, hf_decoder.mlp(options, gated=False, bias=True))
    return hf_decoder.decoder(options, lambda layer: block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | fused_by_head(f"{LAYER}self_attn.query_key_value", block.attention.head_dim, 1)
    found |= linear("attention.wo", f"{LAYER}self_attn.dense", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.dense_h_to_4h", "into")
    found |= linear("mlp.down", f"{LAYER}mlp.dense_4h_to_h", "out")
    return found | layer_norms(
        attention_norm=f"{LAYER}input_layernorm",
        mlp_norm=f"{LAYER}post_attention_layernorm",
        final_norm="model.final_layernorm",
        attention__q_norm=f"{LAYER}self_attn.q_layernorm",
        attention__k_norm=f"{LAYER}self_attn.k_layernorm",
    )
