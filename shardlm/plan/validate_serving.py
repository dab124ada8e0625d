"""Predicts rates and latencies of serving that others published and says how far off each prediction is.

By the same operations, kernels and links as serving plans (plan/serving), with another engine's limits and arithmetic
(systems_serving.py) and a load that answers itself (serving/closed.py). No constant was fitted to these tables: those
that they led to look at (constants.py, SMALL_SUMS and BOTH) are from what others measured of single kernels and sums.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from shardlm.hardware import GPUS
from shardlm.plan import systems_serving
from shardlm.plan.cluster import Cluster
from shardlm.plan.published import Model, load
from shardlm.plan.published_models import transformer
from shardlm.plan.published_serving import Measure, PublishedServing, Setting, Table, load_serving
from shardlm.plan.serving.closed import Part, Requests, Step, closed_loop
from shardlm.plan.serving.mixed import Mixed
from shardlm.plan.validate import FAR, POINTS

TABLES = pathlib.Path(__file__).parents[2] / "benchmarks" / "published_serving.json"
ROUNDS = 4  # of a closed loop, whose requests begin together
LONGEST = 131072


@dataclasses.dataclass(frozen=True)
class ServedRow:
    """One figure.

    predicted  in the same unit
    limit      what most of the time goes to, and how many replies run
    """

    setting: Setting
    measure: Measure
    measured: float
    predicted: float
    limit: str

    @property
    def error(self) -> float:
        """Of the predicted seconds, as a share of the measured ones: negative is too fast."""
        if self.measure == "tokens_per_s":
            return self.measured / self.predicted - 1
        return self.predicted / self.measured - 1


def validate_serving(
    tables: str | pathlib.Path = TABLES,
    points: str | pathlib.Path = POINTS,
    asked: Callable[[Table], bool] = lambda table: True,
) -> list[ServedRow]:
    """All figures of the tables that are asked for, in their order. Raises ShardlmError for a file that cannot be
    read."""
    published = load_serving(tables, load(points).models)
    known: dict[Any, Mixed] = {}
    rows = []
    for setting in published.settings():
        if asked(setting.table):
            rows += predict(setting, published, known)
    return rows


def predict(setting: Setting, published: PublishedServing, known: dict[Any, Mixed]) -> list[ServedRow]:
    """What was measured of one setting; `known`: what is remembered of others."""
    table, model = setting.table, published.models[setting.table.model]
    rereads = 1.0 if systems_serving.shares_keys(table) else model.num_heads / model.num_kv_heads
    key = (table.model, table.gpu, table.mesh, table.weights, table.kv_cache, rereads)
    if key not in known:
        known[key] = _mixed(table, model, rereads)
    predicted, limit = _static(setting, known[key]) if table.load == "static" else _loop(setting, model, known[key])
    return [
        ServedRow(setting, measure, value, predicted[measure], limit) for measure, value in setting.measured.items()
    ]


def _mixed(table: Table, model: Model, rereads: float) -> Mixed:
    gpu, mesh = GPUS[table.gpu], table.mesh
    cluster = Cluster.of(gpu, mesh.size(*mesh.sizes()))
    share = systems_serving.BYTES[table.weights] / systems_serving.BYTES["dtype"]
    how = systems_serving.as_run(table)
    return Mixed.of(transformer(model, LONGEST), cluster, mesh, table.kv_cache, share, how, rereads)


def _static(setting: Setting, mixed: Mixed) -> tuple[Mapping[Measure, float], str]:
    """A batch's prompts in one step, and a step for each further token."""
    P, O, rows = setting.prompt, setting.output, setting.count
    first = mixed.seconds(Step(0, 0.0, (Part(rows, P, 0, True),)))
    parts = mixed.parts(rows, P + O / 2)
    each = sum(parts.values())
    found = {"tokens_per_s": rows * O / (first + (O - 1) * each), "ttft_ms": 1e3 * first, "itl_ms": 1e3 * each}
    return found, _limit(rows, first / (first + (O - 1) * each), parts)


def _loop(setting: Setting, model: Model, mixed: Mixed) -> tuple[Mapping[Measure, float], str]:
    """Requests that come together, or each when one before it ends."""
    P, O, count = setting.prompt, setting.output, setting.count
    held = systems_serving.Held(mixed.held, mixed.reply_bytes)
    most = systems_serving.limits(setting, GPUS[setting.table.gpu], model, held)
    at_once, asked = count, count
    if setting.table.load == "closed loop":
        asked = ROUNDS * max(count, most.slots if count > most.slots else 0)
    done = closed_loop(Requests(asked, at_once, P, O, most.slots, most.room, most.chunked), mixed.seconds)
    rate = asked * O / done.seconds
    parts = mixed.parts(max(1, round(done.running)), P + O / 2)
    found = {"tokens_per_s": rate, "ttft_ms": 1e3 * done.ttft, "itl_ms": 1e3 * done.itl}
    return found, _limit(done.running, done.reading, parts)


def _limit(running: float, reading: float, parts: Mapping[str, float]) -> str:
    most = max(parts, key=lambda name: parts[name])
    return f"{running:.0f} replies, prompts {reading:.0%}, a step's {most} {parts[most] / sum(parts.values()):.0%}"


def format_serving(rows: list[ServedRow]) -> str:
    """A table of figures, and medians of the sets."""
    lines = [f"{'served':62} {'figure':12} {'measured':>9} {'predicted':>9} {'error':>7}  what limits"]
    for row in rows:
        values = f"{row.measured:9,.1f} {row.predicted:9,.1f} {row.error:+7.1%}"
        lines.append(f"{row.setting.name:62} {row.measure:12} {values}  {row.limit}")
    return "\n".join([*lines, "", *serving_summary(rows)])


def serving_summary(rows: list[ServedRow]) -> list[str]:
    """A line for each set: how many, the median of errors and of their sizes, and how many are within 10 and 25%."""
    sets: dict[str, Callable[[ServedRow], bool]] = {"served, all": lambda row: True}
    for measure in dict.fromkeys(row.measure for row in rows):
        sets[f"served, {measure}"] = lambda row, measure=measure: row.measure == measure
    for engine, version in dict.fromkeys((row.setting.table.engine, row.setting.table.version) for row in rows):
        sets[f"served, {engine} {version}"] = lambda row, of=(engine, version): (
            of
            == (
                row.setting.table.engine,
                row.setting.table.version,
            )
        )
    lines = []
    for name, belongs in sets.items():
        errors = [row.error for row in rows if belongs(row)]
        if not errors:
            continue
        sizes = [abs(error) for error in errors]
        within = f"{sum(e <= 0.10 for e in sizes)} within 10%, {sum(e > FAR for e in sizes)} beyond {FAR:.0%}"
        middle = f"median error {statistics.median(sizes):.1%}, median {statistics.median(errors):+.1%}"
        lines.append(f"{name}: {len(errors)} figures, {middle}, {within}")
    return lines


def served_json(rows: list[ServedRow]) -> list[dict[str, Any]]:
    """Of each figure."""
    return [
        {
            "table": row.setting.table.name,
            "prompt": row.setting.prompt,
            "output": row.setting.output,
            "count": row.setting.count,
            "load": row.setting.table.load,
            "measure": row.measure,
            "measured": row.measured,
            "predicted": row.predicted,
            "error": row.error,
            "limit": row.limit,
            "source": row.setting.table.source,
        }
        for row in rows
    ]
