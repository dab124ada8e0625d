"""The part `plan`: training steps as the planner predicts them beside what they take, in seconds and in bytes; and the
machine's profile, by which they are predicted again."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from shardlm import hardware
from shardlm.bench.case import Given
from shardlm.bench.cases import PROFILE
from shardlm.bench.sizes import named
from shardlm.bench.training import steps_of, trained
from shardlm.compiled_together import Lowering
from shardlm.network.profile import load_profile, save_profile
from shardlm.plan.cluster import Cluster
from shardlm.plan.local import cluster_of_profile, measure_here
from shardlm.plan.plan import Plan
from shardlm.plan.ranking import spearman
from shardlm.train.config import RunConfig


def programs(cases: Sequence[str], given: Given) -> dict[str, Lowering]:
    """Steps that are compiled ahead of all cases."""
    return steps_of(cases, named(given.sizes).plan)


def measure(name: str, given: Given) -> Iterator[dict[str, Any]]:
    """The profile's figures as sentences, and the seconds of all steps by it; or one row of a step."""
    sizes = named(given.sizes)
    if name == PROFILE:
        figures: list[str] = []
        save_profile(measure_here(figures.append, **sizes.profile), given.profile)
        seconds = {step: _by_profile(config, given).step_seconds for step, config in sizes.plan.items()}
        yield {"name": PROFILE, "file": given.profile.name, "figures": figures, "seconds_by_profile": seconds}
        return
    config = sizes.plan[name]
    row = {"name": name, **predicted(config, given)}
    result = trained(config, sizes, given.ahead.get(name))
    peak = result["peak_memory_bytes"]
    yield row | {
        "measured_seconds": result["step_seconds"]["p50"],
        "compiled_bytes": peak["compiled"],
        "measured_bytes": peak["measured_on_device"],
        "tokens_per_second": result["tokens_per_second"],
        "mfu": result["mfu"],
    }


def predicted(config: RunConfig, given: Given) -> dict[str, Any]:
    """Of a step on one device: by the table of GPUs, so that steps measured before and after the profile are ranked
    alike; by the profile, where there is one, of a device that is not in it."""
    gpu = hardware.lookup(jax.devices()[0].device_kind)
    if gpu is None and not given.profile.exists():
        return {"profiled": False}
    plan = Plan.of(config, Cluster.of(gpu, 1, 1)) if gpu else _by_profile(config, given)
    return {
        "predicted_seconds": plan.step_seconds,
        "predicted_bytes": sum(plan.memory.kinds.values()),
        "doubt": plan.memory.doubt,
        "profiled": gpu is None,
    }


def _by_profile(config: RunConfig, given: Given) -> Plan:
    return Plan.of(config, cluster_of_profile(load_profile(given.profile), 1))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Spearman's rank correlation of predicted and measured seconds, and how far predictions are off in the middle;
    seconds by the profile too, where it is there."""
    ran = [row for row in rows if row.get("predicted_seconds") and row.get("measured_seconds")]
    by_profile = next((row["seconds_by_profile"] for row in rows if "seconds_by_profile" in row), {})
    found: dict[str, Any] = {"steps": len(ran)}
    ways = {"": [row["predicted_seconds"] for row in ran]}
    if ran and all(row["name"] in by_profile for row in ran) and not any(row["profiled"] for row in ran):
        ways[" by profile"] = [by_profile[row["name"]] for row in ran]
    measured = [row["measured_seconds"] for row in ran]
    for way, seconds in ways.items():
        if len(ran) > 2:
            found[f"rank_correlation{way}"] = spearman(seconds, measured)
        if ran:
            found[f"median_ratio, time{way}"] = statistics.median(a / b for a, b in zip(seconds, measured, strict=True))
    for what, of in (("compiled memory", "compiled_bytes"), ("measured memory", "measured_bytes")):
        ratios = [row["predicted_bytes"] / row[of] for row in ran if row.get(of)]
        if ratios:
            found[f"median_ratio, {what}"] = statistics.median(ratios)
    return found
