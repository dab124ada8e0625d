"""What a step of one plan holds, sends and computes, as plain data: rows whose sums are the plan's totals."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from shardlm.plan.bill import Charge
from shardlm.plan.overlap import Timed
from shardlm.plan.plan import Plan
from shardlm.plan.state import state
from shardlm.plan.verify import Verified

Row = dict[str, Any]


def memory(plan: Plan, checked: Verified | None) -> dict[str, Any]:
    """Bytes of one GPU: `kinds` as estimated, with `doubt` why that may be far off, and sums of what rests and of what
    a step needs besides, beside those of the compiled program, which does not tell kinds apart, with what a compiler
    without a GPU cannot know of."""
    held = plan.memory
    rests = state(plan.sketch).total
    compiled = checked if checked and not checked.failure else None
    return {
        "kinds": [{"kind": kind, "bytes": nbytes} for kind, nbytes in held.kinds.items()],
        "reserve_bytes": held.reserve,
        "limit_bytes": plan.gpu.hbm_bytes,
        "host_bytes": held.host,
        "doubt": held.doubt,
        "estimated": _sums(rests, sum(held.kinds.values()) - rests, held.reserve),
        "compiled": compiled and _compiled(compiled, held.reserve),
    }


def _compiled(checked: Verified, reserve: float) -> dict[str, float]:
    besides = checked.hbm_bytes - checked.argument_bytes
    return _sums(checked.argument_bytes, besides, reserve) | {"workspace_bytes": checked.workspace_bytes}


def _sums(rests: float, besides: float, reserve: float) -> dict[str, float]:
    return {"at_rest_bytes": rests, "during_the_step_bytes": besides, "total_bytes": rests + besides + reserve}


def communication(plan: Plan) -> list[Row]:
    """As estimated, by axes and collective, what takes longest first."""
    return _together(map(_sent, plan.cost.comms), _OVER)


def compiled_communication(checked: Verified | None) -> list[Row] | None:
    """The same of the program; None where there is none."""
    return _together(map(_charge, checked.step.rows), _OVER) if checked and checked.step else None


def compute(plan: Plan) -> dict[str, list[Row]]:
    """Seconds of kernels by layer, and by what limits them."""
    cost = plan.cost
    return {
        "layers": [{"layer": layer, "seconds": seconds} for layer, seconds in _largest(cost.compute)],
        "units": [{"unit": unit, "seconds": seconds} for unit, seconds in _largest(cost.units)],
    }


def timeline(plan: Plan) -> list[Row]:
    """Phases of a step in the order of time, each in parts; the pipeline's idle time is the last."""
    rows = []
    for phase in plan.cost.timeline:
        parts = dataclasses.asdict(phase)
        name = parts.pop("name")
        rows.append({"phase": name, "parts": [{"part": part, "seconds": s} for part, s in parts.items()]})
    idle = {"phase": "pipeline", "parts": [{"part": "idle", "seconds": plan.cost.bubble_seconds}]}
    return [*rows, *([idle] if plan.cost.bubble_seconds else [])]


def bill(plan: Plan, checked: Verified | None) -> dict[str, Any]:
    """Every collective of a step with its cause: of the compiled program where there is one, else as estimated."""
    if not checked or not checked.step:
        return {"basis": "estimated", "rows": _together(map(_sent, plan.cost.comms), _NAMED)}
    return {"basis": "compiled", "rows": list(map(_charge, checked.step.rows))}


def compiled_step(checked: Verified | None) -> dict[str, Any] | None:
    """Seconds of a step as its program is scheduled; None where there is no program."""
    if not checked or not checked.step:
        return None
    step = checked.step
    return {
        "compute_seconds": step.compute_seconds,
        "contention_seconds": step.contention_seconds,
        "xla_compute_seconds": step.xla_compute_seconds,
        "exposed_seconds": step.exposed_seconds,
        "step_seconds": step.step_seconds,
        "unknown_kernels": dict(step.unknown),
    }


def _sent(one: Timed) -> Row:
    return {
        "operation": one.sent.kind,
        "axes": list(one.sent.axes),
        "link": one.link,
        "count": one.sent.count,
        "bytes": one.sent.nbytes,
        "seconds": one.seconds,
        "exposed_seconds": one.exposed_seconds,
        "hidden_seconds": one.hidden_seconds,
        "cause": one.sent.why,
    }


def _charge(one: Charge) -> Row:
    return {
        "operation": one.kind,
        "axes": list(one.axes),
        "dtype": one.dtype,
        "phase": one.phase,
        "link": one.link,
        "count": one.count,
        "bytes": one.nbytes,
        "seconds": one.seconds,
        "exposed_seconds": one.exposed_seconds,
        "hidden_seconds": one.hidden_seconds,
        "cause": one.cause,
        "where": one.where,
        "guess": one.guess,
    }


_SUMMED = ("count", "bytes", "seconds", "exposed_seconds", "hidden_seconds")
_OVER = ("axes", "link", "operation")
_NAMED = (*_OVER, "cause")


def _together(rows: Iterable[Row], names: tuple[str, ...]) -> list[Row]:
    """Rows that agree in `names` as one, what takes longest first; nothing but these and the sums is kept."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(map(str, (row[name] for name in names))), []).append(row)
    found = [
        {name: group[0][name] for name in names} | {name: math.fsum(row[name] for row in group) for name in _SUMMED}
        for group in groups.values()
    ]
    return sorted(found, key=lambda row: -row["seconds"])


def _largest(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: -item[1])
