"""LFM3 (transformers' modeling_lfm3.py is the definition): LFM2's gated short convolutions, with norms before and after
each layer, a gate of each head, and layers with a window between those that see everything, of which only a share of
the pairs turns."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, proportional, rope_of
from shardlm.models.lfm2 import CONV, FULL, conv_names, convolution, dense_names
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope

SLIDING = "sliding_attention"
# What transformers rotates where a config.json says nothing.
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` lfm3."""
    options.only("conv_bias", False)
    norm = NormConfig("rms", options("norm_eps", 1e-5))
    kinds, window = _kinds(options), options("sliding_window", 256)
    gate = bool(options("use_attention_gate", True))
    own = {"qk_norm": "head", "norm": norm, "gate": gate, "gate_of_head": gate}
    usual = hf_decoder.attention(options, rope=None, **own)
    conv = convolution(options, 7)
    attentions = {CONV: conv} | {
        kind: dataclasses.replace(
            usual, window=window if kind == SLIDING else 0, rope=_rope(options, kind, usual.head_dim, length)
        )
        for kind in (FULL, SLIDING)
    }
    feed_forward = MlpConfig(options("intermediate_size"))
    norms = "both" if options("use_sandwich_norm", True) else "pre"

    def block(layer: int) -> BlockConfig:
        return BlockConfig(attentions[kinds[layer]], feed_forward, norms=norms)

    return hf_decoder.decoder(options, block, norm, tied=True)


def _kinds(options: Options) -> list[str]:
    """Of each layer."""
    layers = options("num_hidden_layers")
    usual = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(layers)]
    kinds = options("layer_types", usual)
    if len(kinds) != layers or not {CONV, FULL, SLIDING}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {CONV}, {FULL}, {SLIDING}"
        )
    return kinds


def _rope(options: Options, kind: str, head_dim: int, length: int) -> Rope:
    own = options("rope_parameters", ROPES).get(kind, ROPES[kind])
    return proportional(own) if own.get("rope_type") == "proportional" else rope_of(options, head_dim, kind, length)


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    return name.replace(".self_attn.gate_proj.", ".self_attn.g_proj.")


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(
        attention_norm="operator_norm",
        attention_post_norm="post_operator_norm",
        mlp_norm="ffn_norm",
        mlp_post_norm="post_ffn_norm",
    )
    found |= {"final_norm.scale": Tensor("model.embedding_norm.weight"), **dense_names()}
    if isinstance(block.attention, ShortConvConfig):
        return found | conv_names(block.attention)
    return found | {"attention.wg": Tensor(f"{LAYER}self_attn.gate_proj.weight", "(N H) D -> D N H")}
