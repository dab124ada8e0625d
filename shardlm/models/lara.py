"""Lara 4 Mini (transformers' modeling_lara_mini.py is the definition): Gated DeltaNet, whose projections are one in
files, between layers with a window, which are rotated, and layers that see everything and are not; experts chosen by a
softmax, and a shared one without a gate."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.models import hf_decoder, qwen_hybrid
from shardlm.models.flint import shared_names
from shardlm.models.hf_options import Options
from shardlm.models.mistral4 import together
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig

LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
USUAL = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)  # one after the other, where config.json does not say


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` lara_mini."""
    options.where_absent(head_dim=128, sliding_window=512, norm_topk_prob=True)
    options("intermediate_size", None)  # of dense layers, of which there are none
    norm, kinds = hf_decoder.rms(options), _kinds(options)
    usual = hf_decoder.attention(options, length, qk_norm="head", norm=norm)
    attentions = {
        LINEAR: qwen_hybrid.memory_of(options, norm),
        SLIDING: dataclasses.replace(usual, window=options("sliding_window")),
        FULL: dataclasses.replace(usual, rope=None),
    }
    routed = qwen_hybrid.mixture(options, bool(options("norm_topk_prob")))
    routed = dataclasses.replace(routed, shared_gate=False)
    return hf_decoder.decoder(options, lambda layer: BlockConfig(attentions[kinds[layer]], routed), norm, tied=True)


def _kinds(options: Options) -> list[str]:
    """Of each layer."""
    layers = options("num_hidden_layers")
    kinds = options("layer_types", [USUAL[layer % len(USUAL)] for layer in range(layers)])
    if len(kinds) != layers or not {LINEAR, SLIDING, FULL}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {FULL}, {LINEAR}, {SLIDING}"
        )
    return kinds


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = shared_names() | together(block.mlp)
    if not isinstance(block.attention, DeltaNetConfig):
        return standard() | found
    return qwen_hybrid.layer_names(block) | found | _together(block.attention)


def _together(memory: DeltaNetConfig) -> Names:
    """Projections one after the other: queries, keys, values, the output's gate, what is taken, decays."""
    of_keys, of_values = memory.num_kv_heads * memory.head_dim, memory.num_heads * memory.value_dim
    sizes = {"wq": of_keys, "wk": of_keys, "wv": of_values, "wg": of_values}
    sizes |= {"beta": memory.num_heads, "decay": memory.num_heads}
    found, first, inside = {}, 0, f"{LAYER}linear_attn."
    for path, size in sizes.items():
        layout = "N D -> D N" if path in ("beta", "decay") else "(N H) D -> D N H"
        found[f"attention.{path}"] = Tensor(f"{inside}in_proj.weight", layout, (0, first, first + size, 1))
        first += size
    return found | {"attention.out_norm.scale": Tensor(f"{inside}out_norm.weight")}
