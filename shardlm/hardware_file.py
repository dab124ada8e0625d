"""GPUs and clusters besides those of hardware.py and clusters.py, from a file: TOML or JSON with tables `gpus` and
`clusters`. An entry may start from a known one (`base`) and say only what differs.

    [[gpus]]
    base = "h100"
    name = "h100-500w"
    watts = 500
    datasheet = "our measurement, 2026-11"
"""

import difflib
import pathlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from shardlm import clusters, hardware
from shardlm.clusters import CLUSTERS, ClusterKind
from shardlm.config_json import from_json, to_json
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS, Gpu

PARTS = ("gpus", "clusters")


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
    type or a missing field, and for a cluster of a GPU that is not known.
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
    for field, value in vars(item).items():
        if isinstance(value, int | float) and not value >= 0:
            raise ShardlmError(f"{where}: {field}={value} must not be negative")
    return item


def _merged(base: Any, given: Any) -> Any:
    """`given` over `base`, tables within tables."""
    if not (isinstance(base, dict) and isinstance(given, dict)):
        return given
    return base | {key: _merged(base.get(key), value) for key, value in given.items()}
