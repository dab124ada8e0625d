"""Step 3.5 and 3.7 Flash (https://github.com/stepfun-ai/Step-3.5-Flash), text: norms on the queries and keys of each
head, a gate of each head, layers with a window that may have more heads than others and a rotation of their own, a few
dense layers, then experts as DeepSeek V3's, of which those of some layers have limits."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor, gated, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router

# As published, and as transformers computes them.
FIXED = {
    "hidden_act": "silu",
    "use_head_wise_attn_gate": True,
    "use_qk_norm": True,
    "use_moe_router_bias": True,
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "zero_centered": True,
    "moe_every_n_layer": 1,
    "sink": False,
    "use_mfa": False,
    "mlp_bias": False,
}
# Of texts and programs; and modules that predict further tokens, which are left aside.
ASIDE = ("max_seq_len", "need_fp32_gate", "att_impl_type", "use_moe", "use_rope_layers", "yarn_only_types")
FURTHER = ("num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types", "use_mtp")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` step3p5. Lists may have an entry for each module that predicts further tokens too."""
    options.only_all(FIXED)
    options.aside(*ASIDE, *FURTHER)
    layers = options("num_hidden_layers")
    kinds = options("layer_types", None) or ["full_attention"] * layers
    options.values = {**options.values, **_published_sizes(options), "layer_types": kinds[:layers]}
    windows, norm = hf_decoder.sliding(options, lambda layer: False), hf_decoder.rms(options, offset=1.0)
    heads, scale = _sliding_heads(options, windows), options("query_pre_attn_scalar", options("head_dim"))
    own = {"qk_norm": "head", "norm": norm, "gate": True, "gate_of_head": True}
    usual = hf_decoder.attention(options, rope=None, scale=0.0 if scale == options("head_dim") else scale**-0.5, **own)
    limits, shared_limits = (_limits(options, name) for name in ("swiglu_limits", "swiglu_limits_shared"))
    mixed, experts, width = _mixed(options), _experts(options), options("intermediate_size")

    def attention(layer: int) -> AttentionConfig:
        window, rope = windows[layer], _rope(options, kinds, layer, length)
        return dataclasses.replace(usual, window=window, rope=rope, num_heads=heads if window else usual.num_heads)

    def block(layer: int) -> BlockConfig:
        if not mixed[layer]:
            return BlockConfig(attention(layer), MlpConfig(width, limit=shared_limits[layer]))
        own = {"limit": limits[layer], "shared_limit": shared_limits[layer]}
        return BlockConfig(attention(layer), dataclasses.replace(experts, **own))

    return hf_decoder.decoder(options, block, norm)


def _published_sizes(options: Options) -> Mapping[str, Any]:
    """Sizes by the names that transformers has for them."""
    other = {
        "num_key_value_heads": "num_attention_groups",
        "num_experts_per_tok": "moe_top_k",
        "share_expert_dim": "share_expert_dims",
    }
    found = {ours: options(theirs, None) for ours, theirs in other.items()}
    return {name: value for name, value in found.items() if value is not None}


def _sliding_heads(options: Options, windows: list[int]) -> int:
    """Of layers with a window."""
    other, usual = options("attention_other_setting", None) or {}, options("num_attention_heads")
    heads = options("num_sliding_attention_heads", 0) or other.get("num_attention_heads", usual)
    sizes = {"num_attention_groups": options("num_key_value_heads"), "head_dim": options("head_dim")}
    if any(other.get(name, size) != size for name, size in sizes.items()):
        raise ShardlmError(
            f"config.json has attention_other_setting={other!r}; supported: other heads of queries alone"
        )
    each = options("per_layer_config", None) or {}
    expected = {str(layer): {"num_attention_heads": heads} for layer, window in enumerate(windows) if window}
    if each and {str(layer): own for layer, own in each.items()} != expected:
        raise ShardlmError(f"config.json has per_layer_config={each!r}; supported: {expected!r}")
    return heads


def _mixed(options: Options) -> list[bool]:
    """Which layers have experts."""
    layers, kinds, said = (
        options("num_hidden_layers"),
        options("mlp_layer_types", None),
        options("moe_layers_enum", None),
    )
    if kinds:
        return [kind == "sparse" for kind in kinds[:layers]]
    if said is None:
        return [layer >= 3 for layer in range(layers)]
    chosen = {int(each) for each in (said.split(",") if isinstance(said, str) else said) if str(each).strip()}
    return [layer in chosen for layer in range(layers)]


def _limits(options: Options, name: str) -> list[float]:
    layers = options("num_hidden_layers")
    found = options(name, None) or [0.0] * layers
    return [float(limit or 0.0) for limit in found[:layers]]


def _rope(options: Options, kinds: list[str], layer: int, length: int) -> Rope:
    """By the first layer of its kind, where each has an entry; layers that see everything alone are stretched."""
    kind, head_dim = kinds[layer], options("head_dim")
    if options("rope_parameters", None):
        return rope_of(options, head_dim, kind, length)
    first = kinds.index(kind)

    def of(name: str, usual: float) -> float:
        if not isinstance(options.values.get(name), list):
            return options(name, usual)
        options.asked.add(name)
        return options.values[name][first]

    own = {"rope_theta": of("rope_theta", 10_000.0), "partial_rotary_factor": of("partial_rotary_factors", 1.0)}
    scaling = options("rope_scaling", {}) if kind == "full_attention" else {}
    longest = options.values.get("max_position_embeddings")
    return rope_of(
        Options({"rope_parameters": {**scaling, **own}, "max_position_embeddings": longest}), head_dim, "", length
    )


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("moe_num_experts", 0) or options("n_routed_experts", 0) or options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=options("share_expert_dim"),
        router=Router("sigmoid", scale=float(options("moe_router_scaling_factor", 1.0))),
        load_bias=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | {"attention.wg": Tensor(f"{LAYER}self_attn.g_proj.weight", "(N H) D -> D N H")}
    if isinstance(block.mlp, MoeConfig):
        mixture = f"{LAYER}moe."
        of_experts = {"gate": "E F D -> E D F", "up": "E F D -> E D F", "down": "E D F -> E F D"}
        found |= {f"mlp.{part}": Tensor(f"{mixture}{part}_proj.weight", how) for part, how in of_experts.items()}
        found |= gated("mlp.shared.", f"{LAYER}share_expert.")
        found["mlp.router"] = Tensor(f"{mixture}gate.weight", "E D -> D E")
        found["mlp.router_bias"] = Tensor(f"{mixture}router_bias")
    return found


def unused(text: Mapping[str, Any]) -> re.Pattern | None:
    """Modules that predict further tokens."""
    first, count = text["num_hidden_layers"], text.get("num_nextn_predict_layers") or 0
    numbers = "|".join(map(str, range(first, first + count)))
    return re.compile(rf"model\.layers\.({numbers})\.") if count else None
