"""Whether the planner ranks meshes as the machine does, for `launch.bench plan`: the meshes, what is predicted of each
from a measured profile, and the table beside what was measured. Running them is the launcher's."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.network.profile import Profile
from shardlm.plan.local import cluster_of_profile, provenance
from shardlm.plan.plan import Plan
from shardlm.train.config import RunConfig
from shardlm.train.strategies import EXPERTS, STAGED, VARIANTS, Variant, chosen

MORE = (
    Variant("data x tensor", "rules=zero1 mesh.data=4 mesh.tensor=2"),
    Variant("FSDP x context", "rules=zero3 mesh.fsdp=4 mesh.context=2"),
    Variant("FSDP x context x tensor", "rules=zero3 mesh.fsdp=2 mesh.context=2 mesh.tensor=2"),
    Variant("data x pipeline x tensor", f"{STAGED} mesh.data=2 mesh.pipeline=2 mesh.tensor=2"),
    Variant("experts: over 4, FSDP", "rules=zero3 mesh.fsdp=2 mesh.expert=4", EXPERTS),
    Variant("experts: ZeRO-1", "rules=zero1 mesh.data=8", EXPERTS),
    Variant("experts: FSDP x tensor", "rules=zero3 mesh.fsdp=4 mesh.tensor=2", EXPERTS),
    Variant("experts: over 4, tensor", "rules=zero3 mesh.expert=4 mesh.tensor=2", EXPERTS),
    Variant("experts: FSDP x context", "rules=zero3 mesh.fsdp=4 mesh.context=2", EXPERTS),
)
# What crosses a slow link compressed has no cost in the planner.
MESHES = (*(variant for variant in VARIANTS if "slow_link" not in variant.changes), *MORE)
SETTING = ("date", "device_kind", "host_cpus", "versions", "steps", "warmup", "precision", "optimizer")


def meshes(names: Sequence[str]) -> tuple[Variant, ...]:
    """Those of these names; all for none. Raises ShardlmError for an unknown name."""
    return chosen(names, MESHES)


def predict(config: RunConfig, profile: Profile) -> dict[str, float]:
    """Seconds of a step on the profile's machine, and of what they consist."""
    cost = Plan.of(config, cluster_of_profile(profile, config.cpu_devices)).cost
    return {
        "predicted_seconds": cost.step_seconds,
        "compute_seconds": cost.compute_seconds,
        "communication_seconds": cost.exposed_seconds,
        "bubble_seconds": cost.bubble_seconds,
    }


def row(
    variant: Variant, config: RunConfig, predicted: Mapping[str, float], results: Sequence[Mapping[str, Any] | str]
) -> dict[str, Any]:
    """What the table keeps of a mesh: the median of `bench_training`'s `results`, or why there is none."""
    mesh = {axis: size for axis, size in config.mesh.sizes().items() if size > 1}
    found = {"strategy": variant.name, "model": type(config.model).__name__.removesuffix("Config"), "mesh": mesh}
    found |= {"rules": config.rules, **predicted}
    if errors := [result for result in results if isinstance(result, str)]:
        return found | {"error": errors[0]}
    rounds = [result["step_seconds"]["p50"] for result in results]
    measured = statistics.median(rounds)
    found |= {"measured_seconds": measured, "ratio": predicted["predicted_seconds"] / measured}
    return found | ({"measured_rounds": rounds} if len(rounds) > 1 else {})


def sentence(one: Mapping[str, Any]) -> str:
    """Of a row."""
    if "error" in one:
        return one["error"]
    return f"{one['predicted_seconds']:.3f} s predicted, {one['measured_seconds']:.3f} s measured"


def report(
    rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any] | None, profile: Profile, rounds: int = 1
) -> dict[str, Any]:
    """The rows, the fastest predicted first, with the rank correlation of all and of each model's; `result` is any of
    `bench_training`, for the setting, and `rounds` how many each row is the median of."""
    ran = [one for one in rows if "error" not in one]
    models = {one["model"]: [other for other in ran if other["model"] == one["model"]] for one in ran}
    return {
        "benchmark": "plan",
        **({name: result[name] for name in SETTING} if result else {}),
        "rounds": rounds,
        "profile": provenance(cluster_of_profile(profile)),
        "rank_correlation": _correlation(ran),
        "rank_correlation_by_model": {model: _correlation(found) for model, found in models.items()},
        "median_ratio": statistics.median(one["ratio"] for one in ran) if ran else None,
        "rows": sorted(rows, key=lambda one: one.get("predicted_seconds", math.inf)),
    }


def _correlation(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """None where it has no meaning: for less than three."""
    if len(rows) < 3:
        return None
    return spearman(*([one[name] for one in rows] for name in ("predicted_seconds", "measured_seconds")))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, equal numbers sharing the mean of theirs
    (https://doi.org/10.2307/1412159). Raises ShardlmError for other than two or more pairs that are not all equal."""
    x, y = ranks(a), ranks(b)
    if len(x) != len(y) or len(x) < 2 or not x.std() or not y.std():
        raise ShardlmError(f"{len(x)} and {len(y)} numbers have no rank correlation: it takes pairs of different ones")
    return float(np.mean((x - x.mean()) * (y - y.mean())) / (x.std() * y.std()))


def ranks(values: Sequence[float]) -> np.ndarray:
    """From 1, the smallest first; equal ones share the mean."""
    a = np.asarray(values, float)
    return np.array([(a < v).sum() + ((a == v).sum() + 1) / 2 for v in a])


def markdown(table: Mapping[str, Any]) -> str:
    """A line a mesh, the fastest predicted first, and its places in both orders."""
    ran = [one for one in table["rows"] if "error" not in one]
    places = ranks([one["measured_seconds"] for one in ran])
    head = ["predicted", "measured", "strategy", "model", "mesh", "rules", "predicted s", "measured s", "ratio"]
    lines = [head, ["---:", "---:", *["---"] * 4, *["---:"] * 3]]
    for i, one in enumerate(ran):
        mesh = " x ".join(f"{axis}={size}" for axis, size in one["mesh"].items()) or "1"
        seconds = [f"{one[name]:.3f}" for name in ("predicted_seconds", "measured_seconds")]
        cells = [str(i + 1), f"{places[i]:g}", one["strategy"], one["model"], mesh, one["rules"]]
        lines.append([*cells, *seconds, f"{one['ratio']:.2f}"])
    for one in table["rows"]:
        if "error" in one:
            error = one["error"].replace("|", "/")
            lines.append(["", "", one["strategy"], one["model"], error, *[""] * 4])
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{_caption(table)}\n" if ran else text + "\n"


def _caption(table: Mapping[str, Any]) -> str:
    of = {"all meshes": table["rank_correlation"], **table["rank_correlation_by_model"]}
    said = ", ".join(f"{name} {value:.3f}" for name, value in of.items() if value is not None)
    rounds = table["rounds"]
    own = "a process of its own" if rounds == 1 else f"{rounds} processes in turn with the others', of which the median"
    return (
        f"Spearman's rank correlation: {said or 'none of so few'}. Predicted: {'; '.join(table['profile'])}. Measured: "
        f"median of {table['steps']} steps on {table['date']} ({table['host_cpus']} cores, {table['device_kind']} "
        f"devices, jax {table['versions']['jax']}, {table['precision']}, {table['optimizer']}), each mesh in {own}. "
        f"The first two columns are places in both orders; the median ratio is {table['median_ratio']:.2f}."
    )
