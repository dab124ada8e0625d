"""A plan's seconds under the names of a profile's rows (hlo/rows.py), to stand beside what was measured."""

from shardlm.hlo.rows import communication, exposed
from shardlm.plan.plan import Plan


def rows(plan: Plan) -> dict[str, float]:
    """Of one device and step: kinds of layers, collectives by kind and axes with what is exposed of them, totals."""
    cost = plan.cost
    found = dict(cost.compute)
    for one in cost.comms:
        row = communication(one.sent.kind, one.sent.axes)
        found[row] = found.get(row, 0.0) + one.seconds
        found[exposed(row)] = found.get(exposed(row), 0.0) + one.exposed_seconds
    busy = cost.step_seconds - cost.bubble_seconds
    return found | {"busy": busy, "idle": cost.bubble_seconds, "step": cost.step_seconds}
