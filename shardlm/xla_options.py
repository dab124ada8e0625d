"""Options of the XLA compiler, as named profiles a GPU generation, each with its reason.

Owns which options exist and their check against the installed jaxlib: one it does not know is left out and
reported, never fatal. They are passed per compile, `lowered.compile(compiler_options=...)`, not through
XLA_FLAGS, where one unknown name ends the process.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm import hardware
from shardlm.errors import ShardlmError

Value = bool | int | float | str
Profile = Literal["auto", "none", "cpu", "ampere", "hopper", "blackwell"]


@dataclasses.dataclass(frozen=True)
class Option:
    """One setting, under the names that jaxlib versions have had for it, the newest first."""

    spellings: tuple[tuple[str, Value], ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """An option that the installed jaxlib refused, and what it said."""

    name: str
    value: Value
    reason: str
    error: str


@dataclasses.dataclass(frozen=True)
class XlaOptions:
    """The options of a profile that this jaxlib takes, for `compile(compiler_options=...)`, and the
    others."""

    profile: str
    options: Mapping[str, Value]
    left_out: tuple[LeftOut, ...] = ()

    def report(self) -> str:
        """One line for each option left out; empty if there is none."""
        return "\n".join(
            f"XLA option {out.name}={out.value} of profile {self.profile} is left out: {out.error} "
            f"(it was for: {out.reason})"
            for out in self.left_out
        )


def _pipelined(collective: str, reason: str) -> Option:
    """jaxlib 0.11 made the boolean an enum (openxla/xla pull request 45836)."""
    newest = (f"xla_gpu_pipeline_{collective}", "COLLECTIVE_PIPELINING_MODE_ON")
    return Option((newest, (f"xla_gpu_enable_pipelined_{collective}", True)), reason)


# Read from compiled programs, without a GPU: 16 scanned layers of 4096 x 14336 in bf16 with remat, fsdp over
# 8 H100. Time of collectives that no kernel covers (our estimate), of 80 ms: none of these options 8.1 ms;
# with pipelining and double buffering 0.2 ms, for 0.5 GiB more temporaries (jaxlib 0.10.2; in 0.11.2 8.9 and
# 0.4 ms). Double buffering alone hid nothing, nor did pipelining alone in 0.11.2. The thresholds of combining
# stay at their defaults: gigabytes, as some recipes have, merge gathers into ones that nothing can cover.
_OVERLAP = (
    Option(
        (("xla_gpu_enable_latency_hiding_scheduler", True),),
        "starts collectives early and ends them late, so that kernels run between",
    ),
    _pipelined("all_gather", "gathers the weights of the next layer while this one computes (FSDP)"),
    _pipelined("reduce_scatter", "scatters the gradients of the layer before while this one computes (FSDP)"),
    _pipelined("all_reduce", "the same for replicated data parallel, whose gradients are all-reduced"),
    Option(
        (("xla_gpu_enable_while_loop_double_buffering", True),),
        "unrolls the loop over layers twice, so that the gathered weights of two layers need no copy",
    ),
)

# One list serves the generations until a measurement on one of them tells them apart. XLA:CPU has no
# asynchronous collectives; none of its options was found to help.
PROFILES: Mapping[str, tuple[Option, ...]] = MappingProxyType(
    {"none": (), "cpu": (), "ampere": _OVERLAP, "hopper": _OVERLAP, "blackwell": _OVERLAP}
)


def resolve_profile(name: Profile, device: jax.Device) -> XlaOptions:
    """The options of profile `name` that the installed jaxlib takes when compiling for `device`, which may
    be a compile-only one. "auto" is the profile of the device's generation, or "none" for a device not
    known.

    Raises: ShardlmError for an unknown profile; for an option, never.
    """
    if name != "auto" and name not in PROFILES:
        raise ShardlmError(f"unknown XLA profile {name!r}; choose one of auto, {', '.join(PROFILES)}")
    profile = profile_of(device) if name == "auto" else name
    return check_options(profile, PROFILES[profile], device)


def profile_of(device: jax.Device) -> str:
    """The profile for the generation of a device; "none" if it is not known."""
    if device.platform == "cpu":
        return "cpu"
    gpu = hardware.lookup(device.device_kind)
    if gpu is not None:
        return "ampere" if gpu.generation == "ada" else gpu.generation
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return {"8": "ampere", "9": "hopper", "10": "blackwell", "12": "blackwell"}.get(major, "none")


def check_options(profile: str, options: Sequence[Option], device: jax.Device) -> XlaOptions:
    """Tries each option on a trivial program, all at once first; keeps what compiles, reports the rest."""
    newest = dict(option.spellings[0] for option in options)
    if _error(newest, device) is None:
        return XlaOptions(profile, MappingProxyType(newest))
    kept, left_out = {}, []
    for option in options:
        errors = {spelling: _error(dict([spelling]), device) for spelling in option.spellings}
        taken = [spelling for spelling, error in errors.items() if error is None]
        if taken:
            kept.update([taken[0]])
        else:
            (name, value), error = next(iter(errors.items()))
            left_out.append(LeftOut(name, value, option.reason, error))
    return XlaOptions(profile, MappingProxyType(kept), tuple(left_out))


def _error(options: Mapping[str, Value], device: jax.Device) -> str | None:
    """What compiling for `device` with these options says, or None if it goes well."""
    alone = Mesh(np.array([device]), ("device",))  # whatever mesh the caller is under
    with jax.set_mesh(alone):
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(alone, PartitionSpec()))
        lowered = jax.jit(lambda x: x + 1).lower(scalar)
    try:
        lowered.compile(compiler_options=dict(options))
    except Exception as error:  # of several kinds: unknown names, values of a wrong type, unset backends
        return str(error).splitlines()[0]
    return None
