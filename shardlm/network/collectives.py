"""Times the collectives that shardlm's programs use, over axes of a mesh, as nccl-tests does for a communicator.

Sizes and bandwidths are defined as there (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): the
size S of a collective is what one device holds on the side where it is larger; algorithm bandwidth is S / time; bus
bandwidth is algorithm bandwidth times (n-1)/n, for an all-reduce twice that, for a permutation 1: the bytes that a
device sends in a ring, by the time, which compares with the rate of its link. `bytes` is S in the whole file.
"""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.files import format_bytes

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
DTYPE = jnp.float32  # of which XLA:CPU and NCCL both reduce each element as it is
ITEM = DTYPE.dtype.itemsize
ROUNDS = 5  # timed calls, of which the median counts
MOST_REPEATS, LEAST_REPEATS, REPEATED_BYTES = 50, 4, 2**26  # collectives in a call: so many, but about so many bytes
SIZES = {"gpu": (2**10, 2**13, 2**16, 2**19, 2**22, 2**25, 2**28), "cpu": (2**10, 2**14, 2**18, 2**22)}
PRIME = 127  # the numbers that are sent repeat with it, which is no size of a part


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One point: over `axes`, in groups of group_size devices; bytes is S, seconds are of one collective."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    seconds: float

    @property
    def algorithm_bandwidth(self) -> float:
        return self.bytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        return bus_bytes(self.kind, self.bytes, self.group_size) / self.seconds


def bus_bytes(kind: str, size: int, group_size: int) -> float:
    """Bytes that a device sends in a ring of so many, of a collective of size S."""
    if kind == "collective-permute":
        return float(size)
    return size * (group_size - 1) / group_size * (2 if kind == "all-reduce" else 1)


def measure(mesh: Mesh, axes: Sequence[str], kinds: Sequence[str], sizes: Sequence[int]) -> Iterator[Measurement]:
    """A point for each kind and size, as they are measured; all processes of the mesh must go through all of them.

    A size is rounded up to one that the group divides evenly. Raises: ShardlmError for a size that a device's memory
    does not hold, and for numbers that arrive wrong.
    """
    axes = tuple(axes)
    group = math.prod(mesh.shape[axis] for axis in axes)
    for kind in kinds:
        for size in sorted({_rounded(size, group) for size in sizes}):
            _check_memory(mesh, size)
            yield _point(mesh, kind, axes, group, size)


def _point(mesh: Mesh, kind: str, axes: tuple[str, ...], group: int, size: int) -> Measurement:
    x, wrong = checked(mesh, kind, axes, size)()
    if int(wrong):
        raise ShardlmError(
            f"{kind} over {'+'.join(axes)} of {format_bytes(size)} brought {int(wrong)} wrong numbers to {mesh.size} "
            f"devices in groups of {group}: a link or a driver is at fault; NCCL_DEBUG=INFO shows the path taken"
        )
    repeats = repeats_of(size)
    program = repeated(mesh, kind, axes, repeats).lower(x).compile()
    x = jax.block_until_ready(program(x))  # the first call opens connections
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        x = jax.block_until_ready(program(x))
        seconds.append((time.perf_counter() - started) / repeats)
    return Measurement(kind, axes, group, size, float(np.median(seconds)))


def repeats_of(size: int) -> int:
    """A function of the size alone, so that all processes run the same program."""
    return min(MOST_REPEATS, max(LEAST_REPEATS, REPEATED_BYTES // size))


def checked(mesh: Mesh, kind: str, axes: tuple[str, ...], size: int) -> Any:
    """Jitted () -> (what each device sends, [devices * held]; how many numbers arrived wrong on all devices)."""

    def local() -> tuple[jax.Array, jax.Array]:
        group, rank = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
        x = _number(rank, jnp.arange(held(kind, size, group)))
        wrong = jnp.count_nonzero(once(kind, axes, x) != _expected(kind, group, rank, size // ITEM))
        return x, jax.lax.psum(wrong, mesh.axis_names)

    specs = (PartitionSpec(mesh.axis_names), PartitionSpec())
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False))


def repeated(mesh: Mesh, kind: str, axes: tuple[str, ...], repeats: int) -> Any:
    """Jitted x -> x, donated: the collective so many times one after the other.

    Each waits for the one before by one number of its result (times 0, which XLA may not drop), so that nothing is
    copied from one to the next. An all-reduce takes the whole result: NCCL's sums in place, and XLA would copy what is
    needed again, which an H100's memory does in a seventh of the time that its links take.
    """

    def body(_: Any, x: jax.Array) -> jax.Array:
        y = jax.lax.optimization_barrier(once(kind, axes, x))
        return y if kind == "all-reduce" else x.at[0].add(0 * y[0])

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, body, x)

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), donate_argnums=0)


def once(kind: str, axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """The collective of x [held], in a manual region."""
    if kind == "all-gather":
        return jax.lax.all_gather(x, axes, tiled=True)
    if kind == "reduce-scatter":
        return jax.lax.psum_scatter(x, axes, tiled=True)
    if kind == "all-reduce":
        return jax.lax.psum(x, axes)
    if kind == "all-to-all":
        return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    n = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])


def held(kind: str, size: int, group: int) -> int:
    """Numbers that a device sends in a collective of size S."""
    return size // ITEM // (group if kind == "all-gather" else 1)


def _number(rank: Any, i: jax.Array) -> jax.Array:
    """The number that device `rank` of a group sends at position i. Exact in float32, summed over 4,096 devices too."""
    return (rank + i % PRIME).astype(DTYPE)


def _expected(kind: str, group: int, rank: jax.Array, count: int) -> jax.Array:
    """What must arrive at `rank`, of a collective of `count` numbers."""
    i, part = jnp.arange(count), count // group
    if kind == "all-gather":
        return _number(i // part, i % part)
    if kind == "all-to-all":
        return _number(i // part, rank * part + i % part)
    if kind == "collective-permute":
        return _number((rank - 1) % group, i)
    if kind == "reduce-scatter":
        i = rank * part + jnp.arange(part)
    return (group * (i % PRIME) + group * (group - 1) // 2).astype(DTYPE)


def _rounded(size: int, group: int) -> int:
    return math.ceil(size / (group * ITEM)) * group * ITEM


def _check_memory(mesh: Mesh, size: int) -> None:
    mine = next(device for device in mesh.devices.flat if device.process_index == jax.process_index())
    limit = (mine.memory_stats() or {}).get("bytes_limit")
    if limit and 3 * size > limit:  # what is sent, what arrives and what is expected
        raise ShardlmError(
            f"--sizes: a collective of {format_bytes(size)} takes {format_bytes(3 * size)}, and {mine.device_kind} "
            f"lets {format_bytes(limit)} be used; leave out sizes above {format_bytes(limit // 3)}"
        )


def parse_sizes(words: Sequence[str], platform: str) -> tuple[int, ...]:
    """Bytes of --sizes, as "4096", "64K" or "32MiB"; of no words those of the platform.

    Raises: ShardlmError for another word.
    """
    return tuple(map(_bytes, words)) or SIZES["cpu" if platform == "cpu" else "gpu"]


@functools.cache
def _bytes(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", word.strip())
    size = int(found[1]) * 1024 ** " KMG".index(found[2] or " ") if found else 0
    if size <= 0:
        raise ShardlmError(f"--sizes: {word!r} is not a size; give bytes, as 4096, 64K, 32MiB or 1G")
    return size
