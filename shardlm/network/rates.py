"""What is measured of one device, as it is saved. machine.py measures it. No jax."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MatmulRate:
    """FLOP/s (2 m k n for each product) of [m, k] @ [k, n] and of the way back, [m, n] @ [n, k], in turns, operands and
    results of `dtype` and sums as XLA chooses."""

    m: int
    k: int
    n: int
    dtype: str
    flops_per_second: float


@dataclasses.dataclass(frozen=True)
class MemoryRate:
    """bytes/s read and written together. operation: scale (x = a x: one read, one write) or triad (x = b + a x: two
    reads, one write), of McCalpin's STREAM, on arrays of so many bytes."""

    operation: str
    bytes: int
    bytes_per_second: float


@dataclasses.dataclass(frozen=True)
class HostRate:
    """bytes/s between the device and the host's memory. direction: to_device or to_host; memory: pinned, or pageable,
    as numpy allocates it."""

    direction: str
    memory: str
    bytes: int
    bytes_per_second: float
