"""GPUs and clusters besides those of hardware.py and clusters.py, from a file: TOML or JSON with tables `gpus` and
`clusters`. An entry may start from a known one (`base`) and say only what differs.

    [[gpus]]
    base = "h100"
    name = "h100-500w"
    watts = 500
    datasheet = "our measurement, 2026-11"
"""

import difflib
import math
import pathlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from shardlm import clusters, hardware
from shardlm.clusters import CLUSTERS, ClusterKind
from shardlm.config_json import from_json, to_json
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS, Gpu

PARTS = ("gpus", "clusters")
NONE_AS_ZERO = ("nvlink_bytes_per_second", "nic_bytes_per_second", "watts")
"""Figures of which 0 says that there is none."""
FLOORS = {
    "bytes_per_second": (1e6, "it is in bytes a second, as 450e9 for 450 GB/s"),
    "hbm_bytes": (1e8, "it is in bytes, as 85e9 for 85 GB"),
    "peak.": (1e9, "it is in FLOP/s, as 989e12 for 989 TFLOP/s"),
    "nvlink_domain": (1, "a GPU reaches itself"),
    "gpus_per_host": (1, "a host has one at least"),
}
"""By a part of a figure's name the least that is taken for one: far below any GPU's, above the same in GB or TFLOP."""


@dataclass(frozen=True)
class Hardware:
    """Everything that has a name: what ships with shardlm, and what a file adds or replaces."""

    gpus: Mapping[str, Gpu]
    clusters: Mapping[str, ClusterKind]

    def gpu(self, name: str) -> Gpu:
        """Raises: ShardlmError for an unknown one, with the nearest."""
        return hardware.named(name, self.gpus)

    def cluster(self, name: str) -> ClusterKind:
        """Raises: ShardlmError for an unknown one, with the nearest."""
        return clusters.named(name, self.clusters)


SHIPPED = Hardware(GPUS, CLUSTERS)


def load_hardware(path: str | pathlib.Path) -> Hardware:
    """What ships with shardlm and what the file adds.

    Raises: ShardlmError for a file that is neither TOML nor JSON, for an unknown field (naming the nearest), a wrong
    type or a missing field, for a figure in another unit, and for a cluster of a GPU that is not known.
    """
    path = pathlib.Path(path)
    readers: dict[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": msgspec.json.decode}
    if path.suffix not in readers:
        raise ShardlmError(f"hardware file {path}: the name must end in {' or '.join(readers)}")
    try:
        return hardware_from(readers[path.suffix](path.read_text()))
    except FileNotFoundError as error:
        raise ShardlmError(f"hardware file {path} does not exist") from error
    except (tomllib.TOMLDecodeError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ShardlmError(f"hardware file {path} is not {path.suffix[1:].upper()}: {error}") from error
    except ShardlmError as error:
        raise ShardlmError(f"hardware file {path}: {error}") from error


def hardware_from(data: Any) -> Hardware:
    """The same from what was read."""
    if not isinstance(data, dict):
        raise ShardlmError(f"expected tables {' and '.join(PARTS)}, got {data!r}")
    for key in data:
        if key not in PARTS:
            near = difflib.get_close_matches(key, PARTS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ShardlmError(f"unknown table {key!r}{hint} (it may have: {', '.join(PARTS)})")
    gpus = dict(GPUS)
    for index, entry in enumerate(_entries(data, "gpus")):
        gpu = _read(Gpu, entry, f"gpus.{index}", lambda name: hardware.named(name, gpus))
        if not gpu.device_kinds:
            raise ShardlmError(f"gpus.{index}: device_kinds is empty; name what jax or nvidia-smi call {gpu.name}")
        gpus[gpu.name] = gpu
    kinds = dict(CLUSTERS)
    for index, entry in enumerate(_entries(data, "clusters")):
        kind = _read(ClusterKind, entry, f"clusters.{index}", lambda name: clusters.named(name, kinds))
        hardware.named(kind.gpu, gpus)
        kinds[kind.name] = kind
    return Hardware(MappingProxyType(gpus), MappingProxyType(kinds))


def _entries(data: dict[str, Any], part: str) -> list[Any]:
    entries = data.get(part, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ShardlmError(f"{part}: expected a list of tables ([[{part}]] in TOML), got {entries!r}")
    return entries


def _read(cls: type, entry: dict[str, Any], where: str, base_of: Callable[[str], Any]) -> Any:
    given = {key: value for key, value in entry.items() if key != "base"}
    try:
        base = to_json(base_of(entry["base"])) if "base" in entry else {}
        item = from_json(cls, _merged(base, given))
    except ShardlmError as error:
        raise ShardlmError(f"{where}: {error}") from error
    if "base" in entry and "name" not in given:
        raise ShardlmError(f"{where}: give it a name of its own, besides base={entry['base']!r}")
    for field, value in _figures(item):
        _check(f"{where}: {field}={value}", field, value)
    return item


def _figures(item: Any, inside: str = "") -> Iterator[tuple[str, float]]:
    """Its numbers by name, those of a group in it (`peak.bf16`) too."""
    for field, value in vars(item).items():
        if isinstance(value, int | float):
            yield inside + field, value
        elif is_dataclass(value):
            yield from _figures(value, f"{field}.")


def _check(said: str, field: str, value: float) -> None:
    """Raises ShardlmError for what a plan would divide by, or take for a figure in another unit."""
    if not 0 <= value < math.inf:
        raise ShardlmError(f"{said} must not be negative, and must be finite")
    if not value and field in NONE_AS_ZERO:
        return
    least, unit = next((floor for end, floor in FLOORS.items() if end in field), (0, ""))
    if value < least:
        raise ShardlmError(f"{said} must be at least {least:g}: {unit}")


def _merged(base: Any, given: Any) -> Any:
    """`given` over `base`, tables within tables."""
    if not (isinstance(base, dict) and isinstance(given, dict)):
        return given
    return base | {key: _merged(base.get(key), value) for key, value in given.items()}
