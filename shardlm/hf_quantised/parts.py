"""Which tensors of a checkpoint belong to one weight, and what is said where they do not fit."""

from collections.abc import Collection, Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored

# Of activations and of caches of keys and values, which are computed in the model's own dtype here.
ASIDE = frozenset(
    [
        *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "output_scale", "act_scale"),
        *("output_zero_point", "activation_scale", "kv_scale", "q_scale", "k_scale", "v_scale", "q_zero_point"),
        *("k_zero_point", "v_zero_point", "prob_output_scale", "kv_cache_scaling_factor"),
    ]
)


def split(
    tensors: Mapping[str, Stored], names: Collection[str]
) -> tuple[dict[str, dict[str, Stored]], dict[str, Stored]]:
    """(by module the tensors with these names in it, all others but those set aside)."""
    modules: dict[str, dict[str, Stored]] = {}
    others = {}
    for name, stored in tensors.items():
        module, _, own = name.rpartition(".")
        if own in names:
            modules.setdefault(module, {})[own] = stored
        elif own not in ASIDE:
            others[name] = stored
    return modules, others


def needed(module: str, parts: Mapping[str, Stored], *names: str) -> list[Stored]:
    """These tensors of a module. Raises ShardlmError that names the first one that is not there."""
    there = next(iter(parts))
    for name in names:
        if name not in parts:
            raise missing(parts[there], f"{module}.{there}", f"{module}.{name}")
    return [parts[name] for name in names]


def missing(stored: Stored, name: str, other: str) -> ShardlmError:
    return ShardlmError(f"{stored.file}: {name} is there, and {other} is not; download the checkpoint again")


def misfit(name: str, numbers: Stored, other: str, scales: Stored, expected: str) -> ShardlmError:
    return ShardlmError(
        f"{numbers.file}: {name} is {numbers.dtype}{list(numbers.shape)} and {other} is {scales.dtype}"
        f"{list(scales.shape)}; needed are {expected}. Download the checkpoint again, or open one in 16 bits"
    )


def only(options: Mapping[str, Any], name: str, *known: Any) -> Any:
    """The value of an option, the first of the known ones where there is none. Raises ShardlmError for another one."""
    value = options.get(name)
    value = known[0] if value is None else value
    if value not in known:
        method = options.get("quant_method")
        raise ShardlmError(
            f"config.json has a quantization_config with {name}={value!r}; supported with quant_method={method!r} "
            f"are {', '.join(map(repr, known))}. Open another quantisation of the model, or one in 16 bits"
        )
    return value


def number(options: Mapping[str, Any], name: str) -> int | None:
    """An option that is a whole number or absent. Raises ShardlmError for anything else."""
    value = options.get(name)
    if value is not None and type(value) is not int:
        raise ShardlmError(
            f"config.json has a quantization_config with {name}={value!r}; it needs a whole number. Download it again"
        )
    return value


def a_list(stored: Stored, count: int | None = None) -> bool:
    """Whether it holds whole numbers one after the other, so many of them where that is said."""
    return len(stored.shape) == 1 and stored.dtype.kind == "i" and count in (None, stored.shape[0])
