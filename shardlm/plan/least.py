"""The least time that any way to run on a mesh can have, so that a search for the fastest plan alone begins where there
is most hope, and ends where there is none."""

import math
from collections.abc import Callable, Iterable, Sequence

from shardlm.errors import ShardlmError
from shardlm.plan.bound import INNER, Bound
from shardlm.plan.cluster import Cluster
from shardlm.plan.cost import step_cost, without_weights
from shardlm.plan.sketch import Sketch
from shardlm.train.config import RunConfig

NEARLY = 0.99  # of it: the same sums in another order


class Least:
    """What was found of the meshes of a search: by their inner axes, of which the others differ only in how weights
    are moved; a bound says what is too slow already.

    considered  sketches that were looked at
    """

    def __init__(self, cluster: Cluster, bound: Bound):
        self._cluster, self._bound = cluster, bound
        self._inner: dict[tuple, float] = {}
        self.considered = 0

    def seconds(self, schedules: Iterable[Sequence[RunConfig]]) -> float:
        """On one mesh, of ways to run there that keep all they may of the forward pass: for each schedule those of the
        most microbatches to those of the fewest. The fewest send least and fill kernels best; the most leave stages
        idle for the least time. Infinite where a bound excludes all, and where none can run."""
        left = [variants for variants in schedules if not all(map(self._bound.excludes, variants))]
        if not left:
            return math.inf
        mesh = left[0][0].mesh
        inner = (mesh.pipeline, *(mesh.size(axis) for axis in INNER))
        if inner not in self._inner and math.isfinite(seconds := self._of(left, without_weights)):
            self._inner[inner] = seconds
        if self._inner.get(inner, 0.0) > self._bound.seconds:
            return math.inf
        return self._of(left, step_cost)

    def _of(self, schedules: Iterable[Sequence[RunConfig]], cost: Callable) -> float:
        return min(self._of_schedule(variants, cost) for variants in schedules)

    def _of_schedule(self, variants: Sequence[RunConfig], cost: Callable) -> float:
        for variant in reversed(variants):
            try:
                sketch = Sketch.of(variant, self._cluster.gpu, self._cluster.gpus_per_host)
            except ShardlmError:
                continue
            self.considered += 1
            return NEARLY * cost(sketch, self._cluster).seconds_with(min(map(self._bound.idle, variants)))
        return math.inf
