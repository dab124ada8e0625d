"""Which published runs their own system has since surpassed so far, on the same GPUs, that no prediction from hardware
can be near both. A rule for all points alike; what it finds is still predicted and shown, and counted apart besides."""

from collections.abc import Mapping

from shardlm.plan.published import Point, Published
from shardlm.plan.published_models import step_seconds

BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "mxfp8": 8}


def superseded(published: Published, far: float) -> Mapping[str, str]:
    """Name of a point -> of the fastest later one that supersedes it: the same framework, model, rows, kind and number
    of GPUs, operands of as many bits or more, and so much faster that its time is off by more than `far` for the
    earlier run."""
    speeds = {name: _speed(point, published) for name, point in published.points.items()}
    found = {}
    for name, point in published.points.items():
        later = [other for other in published.points.values() if _comes_after(other, point) and speeds[other.name]]
        fastest = max(later, key=lambda other: speeds[other.name], default=None)
        if fastest and speeds[name] and speeds[name] < (1 - far) * speeds[fastest.name]:
            found[name] = fastest.name
    return found


def _comes_after(other: Point, point: Point) -> bool:
    same = all(getattr(other, field) == getattr(point, field) for field in ("framework", "model", "gpu", "num_gpus"))
    newer = bool(point.released) and other.released > point.released
    return same and newer and other.seq_len == point.seq_len and BITS[other.precision] >= BITS[point.precision]


def _speed(point: Point, published: Published) -> float:
    """Tokens a second; 0 where the source does not settle it."""
    seconds = step_seconds(point, published.model_of(point))
    return point.tokens / seconds if seconds else 0.0
