"""The part `plan`: the machine's profile, then training steps as the planner predicts them from it beside what they
take, in seconds and in bytes."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from shardlm import hardware
from shardlm.bench.case import Given
from shardlm.bench.cases import PROFILE
from shardlm.bench.sizes import named
from shardlm.bench.training import trained
from shardlm.network.profile import load_profile, save_profile
from shardlm.plan.cluster import Cluster
from shardlm.plan.local import cluster_of_profile, measure_here
from shardlm.plan.plan import Plan
from shardlm.plan.ranking import spearman
from shardlm.train.config import RunConfig


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """The profile's figures as sentences, or one row of a step: `predicted_*` by the measured profile where there is
    one, `by_table_seconds` by the table of GPUs."""
    sizes = named(given.sizes)
    if name == PROFILE:
        figures: list[str] = []
        save_profile(measure_here(figures.append, **sizes.profile), given.profile)
        yield {"name": PROFILE, "file": given.profile.name, "figures": figures}
        return
    config = sizes.plan[name]
    row = {"name": name, **predicted(config, given)}
    result = trained(config, sizes)
    peak = result["peak_memory_bytes"]
    yield row | {
        "measured_seconds": result["step_seconds"]["p50"],
        "compiled_bytes": peak["compiled"],
        "measured_bytes": peak["measured_on_device"],
        "tokens_per_second": result["tokens_per_second"],
        "mfu": result["mfu"],
    }


def predicted(config: RunConfig, given: Given) -> dict[str, Any]:
    """Of a step on one device."""
    gpu, found = hardware.lookup(jax.devices()[0].device_kind), {}
    by_table = Plan.of(config, Cluster.of(gpu, 1, 1)) if gpu else None
    plan = by_table
    if given.profile.exists():
        plan = Plan.of(config, cluster_of_profile(load_profile(given.profile), 1))
    if plan is not None:
        found |= {"predicted_seconds": plan.step_seconds, "predicted_bytes": sum(plan.memory.kinds.values())}
        found |= {"doubt": plan.memory.doubt}
    return found | {"by_table_seconds": by_table and by_table.step_seconds, "profiled": given.profile.exists()}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Spearman's rank correlation of predicted and measured seconds, and how far predictions are off in the middle."""
    ran = [row for row in rows if row.get("predicted_seconds") and row.get("measured_seconds")]
    found: dict[str, Any] = {"steps": len(ran)}
    if len(ran) > 2:
        found["rank_correlation"] = spearman(
            *([row[f"{how}_seconds"] for row in ran] for how in ("predicted", "measured"))
        )
    pairs = {
        "time": ("predicted_seconds", "measured_seconds"),
        "compiled memory": ("predicted_bytes", "compiled_bytes"),
    }
    pairs["measured memory"] = ("predicted_bytes", "measured_bytes")
    for what, (a, b) in pairs.items():
        ratios = [row[a] / row[b] for row in ran if row.get(b)]
        if ratios:
            found[f"median_ratio, {what}"] = statistics.median(ratios)
    return found
