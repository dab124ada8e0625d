"""Reads a Hugging Face config.json so that no option is overlooked: what no architecture asked for, and what is not
known to be harmless, is refused by name."""

import math
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.ops.rope import QueryGrowth, Rope
from shardlm.ops.swiglu import Activation

# Of training, of bookkeeping, or of other heads on the same model: they do not change the numbers of this one.
HARMLESS = frozenset(
    [
        "_name_or_path",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "aux_loss_alpha",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "eos_token_ids",
        "ep_size",
        "finetuning_task",
        "id2label",
        "initial_context_length",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "is_matryoshka",
        "label2id",
        "matryoshka_dimensions",
        "max_position_embeddings",
        "max_window_layers",
        "model_type",
        "n_ctx",
        "original_max_position_embeddings",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "rope_interleaved",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "experts_implementation",
    ]
)
# What a model cannot be made without; the second are numbers, the first whole ones.
COUNTS = frozenset(
    [
        *("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "moe_intermediate_size", "n_positions"),
        *("num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token"),
        *("depth", "embed_dim", "num_heads", "out_hidden_size", "spatial_merge_size", "temporal_patch_size"),
    ]
)
POSITIVE = frozenset(
    ["rms_norm_eps", "layer_norm_epsilon", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"]
)
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


class Options:
    """The options of one config.json. Each is asked for once; `finish` refuses the rest."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.asked = set(HARMLESS)

    def __call__(self, name: str, default: Any = ...) -> Any:
        """The option's value; `default` where it is absent or null. Raises ShardlmError where there is no default, and
        for a size that is none."""
        self.asked.add(name)
        value = self.values.get(name)
        if value is None and default is ...:
            raise ShardlmError(f"config.json has no {name!r}, which a {self.values.get('model_type')!r} model needs")
        if value is not None and name in COUNTS | POSITIVE:
            kinds = (int, float) if name in POSITIVE else (int,)
            if type(value) not in kinds or value <= 0:
                what = "a number above 0" if name in POSITIVE else "a whole number of at least 1"
                raise ShardlmError(f"config.json has {name}={value!r}; it needs {what}")
        return default if value is None else value

    def where_absent(self, **usual: Any) -> None:
        """What the family's own class has where a config.json does not say it; null stays null."""
        self.values = {**usual, **self.values}

    def only(self, name: str, *known: Any) -> None:
        """Refuses every value but these; the first is the default."""
        value = self(name, known[0])
        if value not in known:
            works = ", ".join(repr(k) for k in known)
            raise ShardlmError(f"config.json has {name}={value!r}, which is not supported; supported: {works}")

    def only_all(self, values: Mapping[str, Any]) -> None:
        """`only` of each."""
        for name, value in values.items():
            self.only(name, value)

    def inside(self, name: str) -> "Options":
        """Those that one of them has, to be finished by themselves; none where it is absent."""
        own = {**self(name, {}), "model_type": f"{self.values.get('model_type')} in {name}"}
        return Options(own)

    def aside(self, *names: str) -> None:
        """Options that are known and change nothing here."""
        for name in names:
            self(name, None)

    def activation(self, name: str = "hidden_act") -> Activation:
        value = self(name)
        if value not in ACTIVATIONS:
            raise ShardlmError(f"config.json has {name}={value!r}; supported: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def finish(self) -> None:
        """Raises ShardlmError for an option that nobody asked for and that is set."""
        unknown = [name for name, value in self.values.items() if name not in self.asked and value not in (None, False)]
        if unknown:
            shown = ", ".join(f"{name}={self.values[name]!r}" for name in sorted(unknown))
            raise ShardlmError(
                f"config.json of model_type={self.values.get('model_type')!r} has options that shardlm does not know "
                f"and that may change the numbers: {shown}; remove them if they do not"
            )


def rope_of(options: Options, head_dim: int, group: str = "", length: int = 0, partial: float = 1.0) -> Rope:
    """The rotary embedding of the published options `rope_theta` and `rope_scaling`, or of their newer form
    `rope_parameters`; `group` is the kind of layer, where each has its own. `length` is the longest row of this use,
    `partial` the part of each head that the family usually rotates."""
    new = options("rope_parameters", {})
    scaling = new.get(group, new) if new else options("rope_scaling", {})
    theta = scaling.get("rope_theta") or options("rope_theta", 10_000.0)
    options("rope_scaling", None)
    partial = scaling.get("partial_rotary_factor") or options("partial_rotary_factor", partial)
    options("partial_rotary_factor", None), options("rope_theta", None)
    longest = options.values.get("max_position_embeddings") or 0
    common = {"theta": float(theta), "dim": 0 if partial == 1 else int(head_dim * partial), "length": length}
    common["axes"] = axes_of(scaling, (common["dim"] or head_dim) // 2)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    known = {
        "linear": _linear,
        "dynamic": _dynamic,
        "llama3": _llama3,
        "yarn": _yarn,
        "longrope": _longrope,
        "su": _longrope,
    }
    if kind == "default":
        return Rope(**common)
    if kind not in known:
        raise ShardlmError(f"config.json has rope type {kind!r}; supported: default, {', '.join(known)}")
    try:
        return Rope(**common, **known[kind](scaling, longest, options.values))
    except KeyError as missing:
        raise ShardlmError(f"config.json: rope type {kind!r} needs {missing.args[0]!r} in its rope options") from None


def axes_of(scaling: Mapping[str, Any], pairs: int) -> tuple[int, ...]:
    """Which of the axes time, row and column turns each pair of a head: first all of one axis (Qwen2-VL), or in turn,
    and what the last two leave is of the first (Qwen3-VL); () where there is one."""
    section = tuple(scaling.get("mrope_section") or ())
    if not section or not scaling.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(section) for _ in range(count))
    found = [0] * pairs
    for axis, count in enumerate(section[1:], 1):
        found[axis : count * 3 : 3] = [axis] * len(found[axis : count * 3 : 3])
    return tuple(found)


def proportional(own: Mapping[str, Any]) -> Rope:
    """The rotation of options that turn only a share of a head's pairs (Gemma 4)."""
    share, factor = float(own.get("partial_rotary_factor", 1.0)), float(own.get("factor", 1.0))
    return Rope(float(own["rope_theta"]), kind="proportional", share=share, factor=factor)


def growth_of(options: Options, rope: Mapping[str, Any]) -> QueryGrowth | None:
    """How queries grow with their position, by the options of the rotation."""
    if not rope.get("llama_4_scaling_beta"):
        return None
    original = "original_max_position_embeddings"
    return QueryGrowth(float(rope["llama_4_scaling_beta"]), rope.get(original) or options(original))


def _original(scaling, longest, values) -> int:
    """The length that was trained with before stretching; Phi-3 has it beside the rope options."""
    names = "original_max_position_embeddings"
    return values.get(names) or scaling.get(names) or longest


def _linear(scaling, longest, values):
    return {"kind": "linear", "factor": float(scaling["factor"])}


def _dynamic(scaling, longest, values):
    return {"kind": "dynamic", "factor": float(scaling["factor"]), "original_length": longest}


def _llama3(scaling, longest, values):
    return {
        "kind": "llama3",
        "factor": float(scaling["factor"]),
        "low": float(scaling["low_freq_factor"]),
        "high": float(scaling["high_freq_factor"]),
        "original_length": _original(scaling, longest, values),
    }


def mscale(factor: float, weight: float = 1.0) -> float:
    """What yarn multiplies scores with, for a stretch by `factor` (https://arxiv.org/abs/2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(scaling, longest, values):
    original = _original(scaling, longest, values)
    factor = float(scaling.get("factor") or longest / original)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        own, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = mscale(factor, own) / mscale(factor, all_dims) if own and all_dims else mscale(factor)
    return {
        "kind": "yarn",
        "factor": factor,
        "original_length": original,
        "fast": float(scaling.get("beta_fast") or 32),
        "slow": float(scaling.get("beta_slow") or 1),
        "truncate": scaling.get("truncate", True),
        "magnitude": float(magnitude),
    }


def _longrope(scaling, longest, values):
    original = _original(scaling, longest, values)
    factor = scaling.get("factor") or longest / original
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "kind": "longrope",
        "original_length": original,
        "short": tuple(map(float, scaling["short_factor"])),
        "long": tuple(map(float, scaling["long_factor"])),
        "magnitude": float(magnitude),
    }
