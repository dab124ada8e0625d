"""A machine's profile of round numbers, for tests of what the planner makes of one."""

import dataclasses

from shardlm.network.profile import CollectiveRate, Profile
from shardlm.network.rates import MatmulRate, MemoryRate


def between(kind: str, size: int, latency: float, rate: float, domains: int = 1) -> CollectiveRate:
    return CollectiveRate(kind, ("data",), size, domains, domains, "float32", latency, rate, 0.0, 0.0, ())


def planted(kind: str = "cpu", devices: int = 8, hosts: int = 1, **changes) -> Profile:
    """8 x 8 x 8 in a microsecond, 1024 cubed at 100 GFLOP/s, memory at 10 GB/s; all-reduces among 2 and 8."""
    made = Profile(
        *(1, kind, devices, hosts, 1, None, "0.10.2", "2026-11-21", (("data", devices),)),
        matmuls=(
            MatmulRate(8, 8, 8, "float32", 1024 / 1e-6),
            MatmulRate(1024, 1024, 1024, "float32", 1e11),
            MatmulRate(1024, 1024, 1024, "bfloat16", 4e11),
        ),
        memory=(MemoryRate("scale", 2**20, 8e9), MemoryRate("triad", 2**20, 1e10)),
        host=(),
        collectives=(between("all-reduce", 2, 1e-5, 1e9), between("all-reduce", 8, 7e-5, 2e9)),
        memory_bytes=2**30,
    )
    return dataclasses.replace(made, **changes)


EVERY = tuple(between(kind, 8, 1e-4, 1e9) for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
