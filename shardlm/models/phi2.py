"""Phi 1, 1.5 and 2 (https://arxiv.org/abs/2309.05463): attention and a plain GELU side by side after one layer norm,
biases everywhere, the head's among them, and a rotation of a part of each head."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, layer_norms, linear, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` phi."""
    options.where_absent(hidden_act="gelu_new")
    norm = NormConfig("layer", options("layer_norm_eps", 1e-5))
    own = {"bias": True, "out_bias": True, "norm": norm}
    own["qk_norm"] = "head" if options("qk_layernorm", False) else "none"
    attention = hf_decoder.attention(options, length, partial=0.5, **own)
    block = BlockConfig(attention, hf_decoder.mlp(options, gated=False, bias=True), parallel=True)
    return hf_decoder.decoder(options, lambda layer: block, norm, head_bias=True)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | {"head_bias": Tensor("lm_head.bias")}
    found |= linear("attention.wo", f"{LAYER}self_attn.dense", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.fc1", "into") | linear("mlp.down", f"{LAYER}mlp.fc2", "out")
    return found | layer_norms(
        attention_norm=f"{LAYER}input_layernorm",
        final_norm="model.final_layernorm",
        attention__q_norm=f"{LAYER}self_attn.q_layernorm",
        attention__k_norm=f"{LAYER}self_attn.k_layernorm",
    )
