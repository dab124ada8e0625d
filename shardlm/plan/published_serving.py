"""Rates and latencies of serving that others published, as data: models, GPUs, engines, loads and what was measured.

Owns the form of benchmarks/published_serving.json and the refusal of tables that contradict themselves. Predicting them
is validate_serving.py's; models and GPUs are published.py's and hardware.py's.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from shardlm.config_json import from_json
from shardlm.errors import ShardlmError
from shardlm.hardware import GPUS
from shardlm.mesh import MeshSpec
from shardlm.plan.published import Model, parsed

Measure = Literal["tokens_per_s", "ttft_ms", "itl_ms"]
SETTING = ("prompt", "output")
# What tells how many requests there are, by the kind of load.
COUNTED = {"all at once": "requests", "closed loop": "concurrency", "static": "batch"}
MEASURES: tuple[Measure, ...] = ("tokens_per_s", "ttft_ms", "itl_ms")


@dataclasses.dataclass(frozen=True)
class Table:
    """Measurements of one model on one number of GPUs, by one engine.

    weights     what projections and experts are held in, and multiplied in where it is not dtype (16 bits)
    kv_cache    of keys and values; auto: 16 bits
    load        `all at once`: requests of equal lengths are asked for together; `closed loop`: so many at a time, each
                followed by the next; `static`: a batch is read together and decodes together
    source, at  where, and which table there
    columns     lengths of prompt and reply, how many, and then what was measured: output tokens a second of all GPUs,
                mean milliseconds to the first token and between two
    rows        one setting each; None: not told
    """

    name: str
    model: str
    gpu: str
    mesh: MeshSpec
    weights: Literal["dtype", "fp8", "fp4"]
    kv_cache: Literal["auto", "fp8"]
    engine: str
    version: str
    load: Literal["all at once", "closed loop", "static"]
    source: str
    at: str
    columns: tuple[str, ...]
    rows: tuple[tuple[float | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of a table; count: requests in all, at a time, or of a batch, as its load says."""

    table: Table
    prompt: int
    output: int
    count: int
    measured: Mapping[Measure, float]

    @property
    def name(self) -> str:
        return f"{self.table.name} {self.prompt}/{self.output} x{self.count}"


@dataclasses.dataclass(frozen=True)
class PublishedServing:
    models: Mapping[str, Model]
    tables: Mapping[str, Table]

    def settings(self) -> Iterator[Setting]:
        """All rows of all tables."""
        for table in self.tables.values():
            for row in table.rows:
                prompt, output, count, *values = row
                measured = dict(zip(table.columns[3:], values, strict=True))
                found = {name: value for name, value in measured.items() if value is not None}
                yield Setting(table, int(prompt), int(output), int(count), MappingProxyType(found))


def load_serving(path: str | pathlib.Path, models: Mapping[str, Model]) -> PublishedServing:
    """The tables in a file of the form of benchmarks/published_serving.json, whose models are its own and `models`.

    Raises: ShardlmError for a file that is not JSON, an unknown field, a name that stands for nothing, or a table that
    contradicts itself.
    """
    return parsed(path, lambda data: _published(data, models))


def _published(data: Any, models: Mapping[str, Model]) -> PublishedServing:
    if not isinstance(data, dict) or set(data) - {"notes", "models", "tables"} or "tables" not in data:
        given = ", ".join(data) if isinstance(data, dict) else type(data).__name__
        raise ShardlmError(f"expected an object with tables, and perhaps models and notes, got {given}")
    known = {**models, **{one.name: one for one in (from_json(Model, each) for each in data.get("models", []))}}
    tables: dict[str, Table] = {}
    for each in data["tables"]:
        table = from_json(Table, each)
        check(table, known)
        if table.name in tables:
            raise ShardlmError(f"tables: the name {table.name} is there twice")
        tables[table.name] = table
    return PublishedServing(MappingProxyType(known), MappingProxyType(tables))


def check(table: Table, models: Mapping[str, Model]) -> None:
    """Raises: ShardlmError for a table that contradicts itself or names what is not there."""

    def refuse(what: str) -> None:
        raise ShardlmError(f"table {table.name}: {what}")

    if table.model not in models:
        refuse(f"there is no model {table.model!r}")
    if table.gpu not in GPUS:
        refuse(f"there is no GPU {table.gpu!r}; known are {', '.join(GPUS)}")
    first, known = (*SETTING, COUNTED[table.load]), set(MEASURES)
    if table.columns[:3] != first or not table.columns[3:] or set(table.columns[3:]) - known:
        refuse(f"columns={table.columns} are not {first} and some of {MEASURES}; load={table.load!r} has these")
    seen = set()
    for row in table.rows:
        if len(row) != len(table.columns):
            refuse(f"row {row} has not one number for each of {table.columns}")
        if any(value is not None and not 0 < value < float("inf") for value in row) or None in row[:3]:
            refuse(f"row {row}: numbers must be positive, and the first three be told")
        if all(value is None for value in row[3:]):
            refuse(f"row {row}: nothing was measured")
        if row[:3] in seen:
            refuse(f"row {row[:3]} is there twice; keep one")
        seen.add(row[:3])
    if not table.source.strip() or not table.at.strip():
        refuse("source and at must say where the figures stand")
