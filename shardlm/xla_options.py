"""Options of the XLA compiler, as named profiles a GPU generation, each with its reason.

Owns which options exist and their check against the installed jaxlib: one it does not know is left out and
reported, never fatal. They are passed per compile, `lowered.compile(compiler_options=...)`, not through
XLA_FLAGS, where one unknown name ends the process.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
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
    """One setting, under the names that jaxlib versions have had for it, the newest first, and the meshes it is for."""

    spellings: tuple[tuple[str, Value], ...]
    reason: str
    wanted: Callable[[Mesh], bool] = lambda mesh: True


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


def _over_network(mesh: Mesh) -> bool:
    """Whether several processes share the mesh: one a host, as a rule."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


def _without_exchange(mesh: Mesh) -> bool:
    """Whether experts stay where they are: their exchanged rows are large, and XLA needs its limit on memory."""
    return mesh.shape.get("expert", 1) == 1


def _all_at_once(mesh: Mesh) -> bool:
    """Where gathers of all weights of a layer have something to run beside: over the network, without stages or
    exchanged experts."""
    return _over_network(mesh) and _without_exchange(mesh) and mesh.shape.get("pipeline", 1) == 1


def _some_at_once(mesh: Mesh) -> bool:
    """In stages, where eight at once are no quicker and up to 9% more memory (Mixtral as fsdp=2 x context=4 x
    pipeline=4, compiled). With experts exchanged over enough devices: of fewer what is under way is up to 10% more
    memory (data=2 x fsdp=2 x expert=8), and with more than four at once too (a small V3 as fsdp=8 x expert=4)."""
    enough = _without_exchange(mesh) or mesh.shape.get("fsdp", 1) >= 4
    return _over_network(mesh) and enough and not _all_at_once(mesh)


def _over_pcie(mesh: Mesh) -> bool:
    """Whether a host's GPUs reach each other over PCIe, where gathers take about as long as a layer; experts exchanged
    over enough devices, as over the network."""
    gpu = hardware.lookup(mesh.devices.flat[0].device_kind)
    enough = _without_exchange(mesh) or mesh.shape.get("fsdp", 1) >= 4
    return enough and gpu is not None and gpu.nvlink_domain < mesh.devices.size and not _over_network(mesh)


def joined_in_host(mesh: Mesh) -> int:
    """How many of a host's GPUs NVLink joins; 1 where they are not known."""
    first = mesh.devices.flat[0]
    gpu = hardware.lookup(first.device_kind)
    own = sum(device.process_index == first.process_index for device in mesh.devices.flat)
    return gpu.joined(own) if gpu else 1


def _over_many(mesh: Mesh) -> bool:
    """Where a gather over all that weights are split over takes most of its time in steps from device to device."""
    return math.prod(mesh.shape.get(axis, 1) for axis in ("fsdp", "expert", "context")) >= 512


def _gathers_ahead(mesh: Mesh) -> bool:
    """Over the network where layers are not in stages of which tensor splits the sequence: that is gathered in each
    tick too. Inside a host from jaxlib 0.11 on (below), where there are neither stages nor exchanged experts."""
    stages = mesh.shape.get("pipeline", 1)
    if _over_network(mesh):
        return 1 in (mesh.shape.get("tensor", 1), stages)
    return jax.__version_info__ >= (0, 11) and stages == 1 and _without_exchange(mesh)


_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_SEVERAL = (
    Option(
        ((_LIMIT, 8),),
        "lets all gathers of a layer be under way at once, which over the network take as long as a layer",
        _all_at_once,
    ),
    Option(((_LIMIT, 4),), "the same of some of them, in stages and where experts are exchanged", _some_at_once),
    Option(((_LIMIT, 4),), "lets the next gathers of a layer be under way behind each kernel of it", _over_pcie),
)


def _pipelined(collective: str, reason: str, **wanted: Callable[[Mesh], bool]) -> Option:
    """jaxlib 0.11 made the boolean an enum (openxla/xla pull request 45836)."""
    newest = (f"xla_gpu_pipeline_{collective}", "COLLECTIVE_PIPELINING_MODE_ON")
    return Option((newest, (f"xla_gpu_enable_pipelined_{collective}", True)), reason, **wanted)


# Read from compiled programs for H100, without a GPU (jaxlib 0.10.2): seconds of a step, kernels and what no kernel
# covers by our rates. Over the network with the first two, then with the limit on memory and four collectives at once,
# then with pipelined gathers too: Llama 3 70B on 64 GPUs as fsdp=16 x context=4 (remat=dots) 2.68, 2.66 and 2.16; as
# fsdp=16 x tensor=4 2.88, 2.86 and 2.67; on 256 as pipeline=4 x fsdp=8 x tensor=8 26.2, 23.6 and 23.7. With tensor > 1
# pipelining computed attention again (6% more FLOPs there) until what is made again waited for the gradients
# (stack.py); in stages it does not, and with remat=none there is none: 70B on 256 as pipeline=4 x fsdp=4 x context=2 x
# tensor=8 2.087 and 2.058, and 2.087 with XLA's analytical latencies. Some of the first figures are of programs whose
# norms still kept more for the backward pass, a part of their difference, and all of a clock that let each link run for
# itself. DeepSeek V3 on 1,024 as fsdp=64 x expert=8 x context=2, four at once: 117 and 105. Inside a host
# the loop unrolled twice is enough: Llama 3 8B over 8 GPUs 1.019 s, more at once 1.033; without the limit on memory
# remat=none 0.93 -> 0.88. With experts exchanged the limit has to stay: without it a step of a small DeepSeek V3 held
# 63.5 GiB for 50.6. The thresholds of combining stay at their defaults: gigabytes, as some recipes have, merge gathers
# into ones that nothing can cover. But V3's shared experts and latents, 8 to 29 MB each over 1,024 devices, take 1 ms
# each for 0.1 ms of bytes: together 84.8 s a step, apart 87.5 (fsdp=32 x expert=8 x context=4).
# How many at once: a dense layer has six gathers and one or two collectives of its own sequence; with four under way
# the large gathers begin behind the layer's last product, with eight behind its first. By the clock of one stream, with
# 4 and 8: 70B on 256 as fsdp=128 x tensor=2 (dots) 8.45 and 7.56 (jaxlib 0.11.2: 8.24 and 7.58), as fsdp=256 8.43 and
# 8.36, in four stages 23.05 and 23.06; on 64 as fsdp=16 x context=4 2.26 and 2.10, x tensor=4 2.76 and 2.72; 8B on 16
# the same. Memory: 0.1 to 0.4 GiB more, fsdp=256 1.1. With a stream for each kind
# (xla_gpu_experimental_enable_collective_multi_streaming) XLA has one gather of a group under way: 9.69.
# Over PCIe inside a host one gather at a time begins behind the kernel before the one that needs it, and what is longer
# than that kernel waits. Llama 3 8B over 8 L40S, with 1 and 4 under way: 3.77 and 3.28 s (8 and pipelined gathers 3.56;
# of 8 layers with 1, 2, 3, 4, 6, 8: 1.25, 1.18, 1.10, 1.10, 1.20, 1.16, with 8 and pipelined gathers 1.10); as data=2 x
# fsdp=4 4.34 and 3.73, as fsdp=4 x tensor=2 4.18 and 4.10 (0.8 GiB more), of 8 layers as fsdp=4 x context=2 the same,
# with dots 1.11 and 1.02, with 2,048 tokens 0.70 and 0.68, over 8 RTX PRO 6000 0.93 and 0.84; Mixtral's layers, not
# exchanged, 1.58 and 1.49, as fsdp=4 x expert=2 0.95 and 0.91, in stages 5.20 and 4.59 (8B as pipeline=4 x fsdp=2;
# 1F1B of 8 layers 3.01 and 2.89), replicas the same. jaxlib 0.11.2, 8 layers: 1.19 and 1.06 (8 under way: 1.02).
# jaxlib 0.11.2 orders a layer's collectives otherwise: inside a host gradients are scattered before anything else and
# behind nothing, unless gathers are pipelined. Llama 3 8B over 8 H100, 2,048 tokens each, by 0.10.2, by 0.11.2 without
# and with it: remat=names 0.289, 0.317 and 0.290 s; full 0.293, 0.300 and 0.292; dots 0.257, 0.283 and 0.278; none
# 0.253, 0.288 and 0.270; names with 8,192 tokens 1.042, 1.070 and 1.052; as data=2 x fsdp=4 0.495, 0.527 and 0.515; as
# fsdp=4 x context=2 1.072, 1.084 and 1.078; as fsdp=4 x tensor=2 1.006, 1.008 and 1.009. With exchanged experts and in
# stages it costs (Mixtral as fsdp=2 x expert=4 1.122 and 1.144, 8B as pipeline=2 x fsdp=4 0.553 and 0.566). Two and
# four collectives at once gain with dots (0.269) and lose with names (0.307).
_OVERLAP = (
    Option(
        (("xla_gpu_enable_latency_hiding_scheduler", True),),
        "starts collectives early and ends them late, so that kernels run between",
    ),
    Option(
        (("xla_gpu_enable_while_loop_double_buffering", True),),
        "unrolls the loop over layers twice, so that the second layer's weights are gathered behind the first",
    ),
    Option(
        (("xla_gpu_memory_limit_slop_factor", 200),),
        "keeps XLA from gathering again, after scheduling, what its estimate of memory has no room for",
        _without_exchange,
    ),
    *_SEVERAL,
    Option(
        (("xla_gpu_all_gather_combine_threshold_bytes", 128 * 2**20),),
        "gathers a layer's small weights together, where each takes as long by itself",
        _over_many,
    ),
    _pipelined(
        "all_gather",
        "gathers the weights of the next layers while these compute (FSDP)",
        wanted=_gathers_ahead,
    ),
    _pipelined("reduce_scatter", "scatters the gradients of the layer before while this one computes (FSDP)"),
    _pipelined("all_reduce", "the same for replicated data parallel, whose gradients are all-reduced"),
)

# Tokens sent to experts by a ragged all-to-all. XLA's own kernel for up to eight GPUs gave gradients that were no
# numbers on GB200 (jaxlib 0.11.0), and with several collectives under way runs hung or gave other gradients each time;
# one at a time they were right (https://github.com/marin-community/marin/issues/8077, and that project's notes of
# 2026-09-30). By NCCL the host reads the sizes and waits for them, which was not measured. jaxlib 0.11 has to be told
# that NCCL is meant.
_RAGGED = (
    Option(
        (("xla_gpu_unsupported_use_ragged_all_to_all_one_shot_kernel", False),),
        "sends tokens by NCCL, not by a kernel with which gradients were wrong",
    ),
    *(
        (
            Option(
                (("xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback", True),),
                "lets tokens be sent by NCCL",
            ),
        )
        if jax.__version_info__ >= (0, 11)
        else ()
    ),
    Option(((_LIMIT, 1),), "keeps tokens from being sent beside other collectives, with which runs hung"),
)

# XLA:CPU has no asynchronous collectives; none of its options was found to help. One keeps numbers right: as it orders
# work to run at once, a program over several devices that is read back from a compile cache may run collectives of one
# device beside others of another (pipeline=2 in three rounds: gradients off by up to 240 times their size, another
# number each time, or a wait that ends the process; jaxlib 0.10.2 and 0.11.2. Never as it was compiled.)
_IN_ORDER = (
    Option(
        (("xla_cpu_enable_concurrency_optimized_scheduler", False),),
        "keeps collectives in one order in programs that are read from a compile cache",
        lambda mesh: mesh.devices.size > 1,
    ),
)

# One list serves the generations of GPUs until a measurement on one of them tells them apart.
PROFILES: Mapping[str, tuple[Option, ...]] = MappingProxyType(
    {"none": (), "cpu": _IN_ORDER, "ampere": _OVERLAP, "hopper": _OVERLAP, "blackwell": _OVERLAP}
)


def resolve_profile(name: Profile, mesh: Mesh, ragged: bool = False) -> XlaOptions:
    """The options of profile `name` for `mesh` that the installed jaxlib takes when compiling for its devices, which
    may be compile-only ones. "auto" is the profile of their generation, or "none" for devices not known. `ragged`:
    whether the program sends tokens to experts by ragged all-to-alls.

    Raises: ShardlmError for an unknown profile; for an option, never.
    """
    if name != "auto" and name not in PROFILES:
        raise ShardlmError(f"unknown XLA profile {name!r}; choose one of auto, {', '.join(PROFILES)}")
    device = mesh.devices.flat[0]
    profile = profile_of(device) if name == "auto" else name
    options = [option for option in PROFILES[profile] if option.wanted(mesh) and not (ragged and option in _SEVERAL)]
    ours = PROFILES[profile] is _OVERLAP
    return check_options(profile, [*options, *(_RAGGED if ragged and ours else ())], device)


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
