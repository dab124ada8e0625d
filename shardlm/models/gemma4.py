"""Gemma 4, text (transformers' modeling_gemma4.py is the definition): Gemma 3's layers, with values normed too, scores
without a scale, and heads of another size in layers that see everything, of which only a share of the pairs turns. The
small ones have inputs of each layer's own, and their last layers read the keys and values of earlier ones; some have
keys for values, and experts beside the feed-forward layer."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.layer_inputs import LayerInputsConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import gemma, hf_decoder
from shardlm.models.hf_options import Options, proportional, rope_of
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig
from shardlm.ops.rope import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
# What transformers rotates where a config.json says nothing.
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gemma4_text, and gemma4_unified_text, which has neither inputs of layers nor experts."""
    options.only("use_bidirectional_attention", None, False, "vision")  # of pictures' tokens, which text has none of
    layers, reading = options("num_hidden_layers"), options("num_kv_shared_layers", 0)
    kinds = _kinds(options)
    last = check_readers(kinds, reading)
    norm, width = hf_decoder.rms(options), options("intermediate_size")
    attentions = {kind: _attention(options, kind, norm, length) for kind in dict.fromkeys(kinds)}
    has_inputs = options("model_type") == "gemma4_text"
    dim, vocab = (
        options("hidden_size_per_layer_input", 256 * has_inputs),
        options("vocab_size_per_layer_input", 262_144),
    )
    activation = options.activation("hidden_activation")
    inputs = LayerInputsConfig(dim, activation, vocab) if dim else None
    mixed, wide = bool(options("enable_moe_block", False)), 2 if options("use_double_wide_mlp", False) else 1
    options.aside("num_experts", "top_k_experts", "moe_intermediate_size")

    def block(layer: int) -> BlockConfig:
        kind, reads = kinds[layer], layer >= layers - reading
        attention = attentions[kind]
        if reads:
            attention = dataclasses.replace(attention, reads=kind, keys_are_values=False)
        elif last.get(kind) == layer:
            attention = dataclasses.replace(attention, keeps=kind)
        own = width * wide if reads else width
        mlp = _experts(options, own, norm) if mixed else MlpConfig(own, activation)
        return BlockConfig(attention, mlp, norms="both", inputs=inputs, out_scale=True)

    scale, cap = float(options("hidden_size")) ** 0.5, float(options("final_logit_softcapping", 0.0))
    return hf_decoder.decoder(
        options, block, norm, True, embed_scale=scale, logits=LogitsConfig(softcap=cap), inputs=inputs
    )


def check_readers(kinds: list[str], reading: int) -> dict[str, int]:
    """Of each kind the last layer before the `reading` ones behind, which read what it keeps. Raises ShardlmError where
    there is none."""
    owners = kinds[: len(kinds) - reading]
    if set(owners) != set(kinds):
        raise ShardlmError(
            f"config.json has num_kv_shared_layers={reading}: of the first {len(owners)} layers none is of the kind "
            f"{', '.join(sorted(set(kinds) - set(owners)))}, whose keys and values later ones would read"
        )
    return {kind: layer for layer, kind in enumerate(owners)} if reading else {}


def _kinds(options: Options) -> list[str]:
    """Of each layer; the last sees everything, whatever is said of it."""
    layers = options("num_hidden_layers")
    kinds = options("layer_types", None) or [SLIDING if (i + 1) % 6 else FULL for i in range(layers)]
    if len(kinds) != layers or not {FULL, SLIDING}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {FULL}, {SLIDING}"
        )
    return [*kinds[:-1], FULL]


def _attention(options: Options, kind: str, norm: NormConfig, length: int) -> AttentionConfig:
    full = kind == FULL
    alike = bool(options("attention_k_eq_v", False))
    own = _own_sizes(options) if full else {}
    head_dim = own.get("head_dim", options("head_dim"))
    kv_heads = own.get("num_key_value_heads", options("num_key_value_heads"))
    window = options("sliding_window")
    return hf_decoder.attention(
        options,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        rope=_rope(options, kind, head_dim, length),
        window=0 if full else window,
        scale=1.0,
        qk_norm="head",
        norm=norm,
        value_norm=True,
        keys_are_values=alike and full,
        ahead=not full or options("model_type") == "gemma4_unified_text",
    )


def _own_sizes(options: Options) -> Mapping[str, int]:
    """Of the heads of layers that see everything: as published, or as transformers writes them, for each such layer."""
    older = {"head_dim": options("global_head_dim", 512)}
    if options("attention_k_eq_v", False) and options("num_global_key_value_heads", None):
        older["num_key_value_heads"] = options("num_global_key_value_heads")
    options("num_global_key_value_heads", None)
    each = options("per_layer_config", None)
    if each is None:
        return older
    kinds = _kinds(options)
    full = {str(layer) for layer, kind in enumerate(kinds) if kind == FULL}
    different = {tuple(sorted(one.items())) for one in each.values()}
    known = all(name in ("head_dim", "num_key_value_heads") for one in different for name, _ in one)
    if {str(layer) for layer in each} != full or len(different) != 1 or not known:
        raise ShardlmError(
            f"config.json has per_layer_config={each!r}; supported: the same head_dim and num_key_value_heads for all "
            f"layers of {FULL} ({', '.join(sorted(full, key=int))}), and for no other"
        )
    return dict(different.pop())


def _rope(options: Options, kind: str, head_dim: int, length: int) -> Rope:
    ropes = options("rope_parameters", None) or ROPES
    own = ropes.get(kind, ROPES[kind])
    if own.get("rope_type") == "proportional":
        return proportional(own)
    return rope_of(options, head_dim, kind, length)


def _experts(options: Options, width: int, norm: NormConfig) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_experts"),
        top_k=options("top_k_experts"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=width,
        activation=options.activation("hidden_activation"),
        apart=True,
        norm=norm,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = {**gemma.names(config, block), **input_names(), "out_scale": Tensor(f"{LAYER}layer_scalar")}
    return found | _expert_names(block.mlp, found) if isinstance(block.mlp, MoeConfig) else found


def input_names() -> Names:
    """Of layers' own inputs."""
    return {
        "inputs.gate": Tensor(f"{LAYER}per_layer_input_gate.weight", "P D -> D P"),
        "inputs.up": Tensor(f"{LAYER}per_layer_projection.weight", "D P -> P D"),
        "inputs.norm.scale": Tensor(f"{LAYER}post_per_layer_input_norm.weight"),
        "layer_inputs.table": Tensor("model.embed_tokens_per_layer.weight", "V (L P) -> V L P"),
        "layer_inputs.from_embedding": Tensor("model.per_layer_model_projection.weight", "(L P) D -> D L P"),
        "layer_inputs.norm.scale": Tensor("model.per_layer_projection_norm.weight"),
    }


def _expert_names(mixture: MoeConfig, dense: Names) -> Names:
    F, norm = mixture.expert_dim, "feedforward_layernorm"
    both = Tensor(f"{LAYER}experts.gate_up_proj", "E F D -> E D F")
    norms = {"shared_norm": f"post_{norm}_1", "before_norm": f"pre_{norm}_2", "after_norm": f"post_{norm}_2"}
    return {
        **{f"mlp.shared.{part}": dense[f"mlp.{part}"] for part in ("gate", "up", "down")},
        **{f"mlp.{ours}.scale": Tensor(f"{LAYER}{theirs}.weight") for ours, theirs in norms.items()},
        "mlp.router": Tensor(f"{LAYER}router.proj.weight", "E D -> D E"),
        "mlp.router_norm.scale": Tensor(f"{LAYER}router.scale"),
        "mlp.expert_scale": Tensor(f"{LAYER}router.per_expert_scale"),
        "mlp.gate": dataclasses.replace(both, part=(1, 0, F, 1)),
        "mlp.up": dataclasses.replace(both, part=(1, F, 2 * F, 1)),
        "mlp.down": Tensor(f"{LAYER}experts.down_proj", "E D F -> E F D"),
    }


def unused(text: Mapping[str, Any]) -> re.Pattern | None:
    """The tensors of a checkpoint that no layer uses: projections of layers that read others' keys and values."""
    count, layers = text.get("num_kv_shared_layers") or 0, text["num_hidden_layers"]
    if not count:
        return None
    readers = "|".join(map(str, range(layers - count, layers)))
    return re.compile(rf"model\.layers\.({readers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
