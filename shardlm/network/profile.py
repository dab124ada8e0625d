"""What was measured on a machine, as a file: what a planner reads instead of the printed figures of a GPU. No jax.

The file is JSON, the fields of `Profile` below by name; seconds, bytes and FLOP/s in plain units. For instance

    {"format": 1, "device_kind": "NVIDIA H200", "devices": 8, "hosts": 1, "nvlink_domain": 8,
     "nvlink_bytes_per_second": 4.78e11, "memory_bytes": 112000000000, "jax": "0.10.2", "date": "2026-11-21",
     "mesh": [["fsdp", 8]],
     "matmuls": [{"m": 4096, "k": 4096, "n": 4096, "dtype": "bfloat16", "flops_per_second": 7.1e14}],
     "memory": [{"operation": "triad", "bytes": 1073741824, "bytes_per_second": 4.1e12}],
     "host": [{"direction": "to_device", "memory": "pinned", "bytes": 268435456, "bytes_per_second": 5.5e10}],
     "collectives": [{"kind": "all-gather", "axes": ["fsdp"], "group_size": 8, "hosts": 1, "domains": 1,
                      "dtype": "float32", "latency_seconds": 1.2e-5, "bytes_per_second": 3.6e11,
                      "error": 0.04, "largest_error": 0.1, "points": [[1024, 1.2e-5], [33554432, 9.3e-5]]}]}

(figures of an example). A collective of S bytes, counted as in collectives.py, over such a group takes
latency_seconds + bus_bytes(kind, S, group_size) / bytes_per_second; its points are (S, seconds).
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence

from shardlm.config_json import from_json, to_json
from shardlm.errors import ShardlmError
from shardlm.files import write_atomically
from shardlm.network.rates import HostRate, MatmulRate, MemoryRate

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class CollectiveRate:
    """One kind over one set of mesh axes: the fitted line, how far the points are from it (root mean square and largest
    relative error), and the points (S, seconds). hosts and domains are how many a group spans."""

    kind: str
    axes: tuple[str, ...]
    group_size: int
    hosts: int
    domains: int
    dtype: str
    latency_seconds: float
    bytes_per_second: float
    error: float
    largest_error: float
    points: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Profile:
    """A machine as measured.

    device_kind              as jax calls it
    devices, hosts           of the whole mesh
    nvlink_domain            devices that reach each other over NVLink; 1: none
    nvlink_bytes_per_second  of one GPU in one direction, from the driver; None where it tells none
    mesh                     (axis, size) of those larger than 1, outermost first
    matmuls, memory, host    of one device, of CPU devices while those of its host all work; empty where only
                             collectives were measured, `host` also on CPUs
    memory_bytes             of one device, of CPU devices its share of the host's; None where nothing tells it
    """

    format: int
    device_kind: str
    devices: int
    hosts: int
    nvlink_domain: int
    nvlink_bytes_per_second: float | None
    jax: str
    date: str
    mesh: tuple[tuple[str, int], ...]
    matmuls: tuple[MatmulRate, ...]
    memory: tuple[MemoryRate, ...]
    host: tuple[HostRate, ...]
    collectives: tuple[CollectiveRate, ...]
    memory_bytes: int | None = None

    def collective(self, kind: str, group_size: int, hosts: int) -> CollectiveRate | None:
        """The rate of a kind in groups of such a size that span so many hosts; None where it was not measured."""
        found = [
            rate for rate in self.collectives if (rate.kind, rate.group_size, rate.hosts) == (kind, group_size, hosts)
        ]
        return found[0] if found else None


def save_profile(profile: Profile, path: str | os.PathLike) -> None:
    """Raises: ShardlmError where the file cannot be written."""
    write_atomically(pathlib.Path(path), json.dumps(to_json(profile), indent=1).encode() + b"\n")


def load_profile(path: str | os.PathLike) -> Profile:
    """The profile in a file that `save_profile` wrote.

    Raises: ShardlmError for a file that is not there, is not JSON or of another format, for fields that are missing,
    unknown or of another type, and for rates that no machine has.
    """
    path, again = pathlib.Path(path), "measure again: python -m launch.topology --profile=FILE"
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ShardlmError(f"profile {path}: {error.strerror or error}; {again}") from error
    except ValueError as error:
        raise ShardlmError(f"profile {path} is not JSON: {error}; {again}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ShardlmError(f"profile {path} has the format {found!r}, and this version reads {FORMAT}; {again}")
    try:
        profile = from_json(Profile, data)
        _check(profile)
    except ShardlmError as error:
        raise ShardlmError(f"profile {path}: {error}; {again}") from error
    return profile


def _check(profile: Profile) -> None:
    for group in ("matmuls", "memory", "host", "collectives"):
        _check_rates(group, getattr(profile, group))
    for name in ("devices", "hosts", "nvlink_domain"):
        if getattr(profile, name) < 1:
            raise ShardlmError(f"{name} is {getattr(profile, name)}, and must be 1 or more")


def _check_rates(group: str, rates: Sequence[MatmulRate | MemoryRate | HostRate | CollectiveRate]) -> None:
    for i, rate in enumerate(rates):
        name = "flops_per_second" if isinstance(rate, MatmulRate) else "bytes_per_second"
        value = getattr(rate, name)
        if not 0 < value < 1e18:
            raise ShardlmError(f"{group}.{i}.{name} is {value}, and must be a rate above 0 and below 1e18")
        if isinstance(rate, CollectiveRate) and not 0 <= rate.latency_seconds < 60:
            raise ShardlmError(f"{group}.{i}.latency_seconds is {rate.latency_seconds}, and must be 0 to 60 seconds")
