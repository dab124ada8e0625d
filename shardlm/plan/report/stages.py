"""When each stage of a pipeline works: forward, backward or not at all, as layers/pipeline.py's Schedule has it."""

import itertools
from typing import Any

from shardlm.plan.plan import Plan

Span = tuple[str, int, int]  # what, ticks, microbatches in them


def stages(plan: Plan) -> dict[str, Any] | None:
    """Per stage, spans of one kind in the order of time, whose seconds sum to the step's. None without a pipeline."""
    schedule = plan.sketch.schedule
    if schedule.stages == 1:
        return None
    bubble = schedule.bubble_fraction()
    piped = plan.cost.bubble_seconds / bubble  # what the stages take, idle time included
    phases = {phase.name: phase.seconds for phase in plan.cost.timeline}
    last = phases["optimizer"]
    outside = plan.step_seconds - piped - last
    forward = piped * phases["forward"] / (phases["forward"] + phases["backward"])
    rows = []
    for stage in range(schedule.stages):
        if schedule.both_ways:
            tick = piped / schedule.ticks
            spans = [_span(span, tick) for span in _both_ways(stage, schedule.stages, schedule.microbatches)]
            spans.append(_rest(outside))
        else:
            there = _one_way(stage, schedule.stages, schedule.microbatches * schedule.rounds)
            spans = [_span(("forward" if n else "idle", t, n), forward / schedule.ticks) for t, n in there]
            spans.append(_rest(outside))
            back = (piped - forward) / schedule.ticks
            spans += [_span(("backward" if n else "idle", t, n), back) for t, n in reversed(there)]
        spans.append({"what": "optimizer", "seconds": last, "jobs": 1})
        rows.append([span for span in spans if span["seconds"] > 0])
    return {
        "schedule": plan.config.pipeline.schedule,
        "rounds": schedule.rounds,
        "microbatches": schedule.microbatches,
        "ticks": schedule.ticks,
        "idle_share": bubble,
        "weights_rest_whole": "pipeline" not in plan.sketch.rules.rest.axes("embed"),
        "rows": [{"stage": i, "spans": spans} for i, spans in enumerate(rows)],
    }


def _span(span: Span, tick_seconds: float) -> dict[str, Any]:
    what, ticks, jobs = span
    return {"what": what, "seconds": ticks * tick_seconds, "jobs": jobs}


def _rest(seconds: float) -> dict[str, Any]:
    return {"what": "outside the stages", "seconds": seconds, "jobs": 1}


def _one_way(stage: int, stages: int, jobs: int) -> list[tuple[int, int]]:
    """(ticks, jobs) of the forward pass; the backward pass is its mirror image."""
    return [(stage, 0), (jobs, jobs), (stages - 1 - stage, 0)]


def _both_ways(stage: int, stages: int, jobs: int) -> list[Span]:
    """1F1B: microbatch i goes forward in tick i + stage, backward in tick i + 2 * stages - 2 - stage."""
    first, back = stage, 2 * stages - 2 - stage
    edges = sorted({0, first, first + jobs, back, back + jobs, jobs + 2 * (stages - 1)})
    spans = []
    for begin, end in itertools.pairwise(edges):
        going, coming = first <= begin < first + jobs, back <= begin < back + jobs
        what = {(1, 1): "forward and backward", (1, 0): "forward", (0, 1): "backward", (0, 0): "idle"}[going, coming]
        spans.append((what, end - begin, (end - begin) * (going or coming)))
    return spans
