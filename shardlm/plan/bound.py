"""The fastest plan of a search so far, and what need not be looked at any more because of it. Not a proof, as computing
and waiting are those of plans that were seen; tests hold it to the whole search."""

import dataclasses
import functools
import math

from shardlm.layers.pipeline import Schedule
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.expert_dispatch import beside_weights
from shardlm.plan.alike import INNER
from shardlm.plan.plan import Plan
from shardlm.train.config import RunConfig

# How far below the least that was seen another plan may be: of computing, of what layers wait for over the same axes;
# and the share of a device's work that waits while stages fill and drain, the rest being head, embedding and optimizer.
COMPUTING, WAITING, STAGED = 0.95, 0.8, 0.9


@dataclasses.dataclass
class Bound:
    """seconds    of the fastest plan so far that fits
    computing  the least that any plan computes, in seconds
    waiting    by `_inner`, the least that any plan waits for communication over these axes
    """

    shape: TransformerConfig
    seconds: float = math.inf
    computing: float = math.inf
    waiting: dict[tuple[int, ...], float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def repeats(self) -> int:
        """Layers in stages."""
        return self.shape.segments[self.shape.pipelined_segment()].repeats

    def add(self, plan: Plan) -> None:
        """A plan that fits."""
        self.seconds = min(self.seconds, plan.step_seconds)
        self.computing = min(self.computing, plan.cost.compute_seconds)
        inner = _inner(plan.config)
        waits = sum(one.exposed_seconds for one in plan.cost.comms if set(one.sent.axes) <= set(INNER))
        self.waiting[inner] = min(waits, self.waiting.get(inner, math.inf))

    def excludes(self, config: RunConfig) -> bool:
        """Whether bubble and inner axes alone make it slower than the fastest. It costs a hundredth of a plan."""
        if math.isinf(self.seconds):
            return False
        work = COMPUTING * self.computing + WAITING * self.waiting.get(_inner(config), 0.0)
        return work * (1 + STAGED * self.idle(config)) > self.seconds

    def idle(self, config: RunConfig) -> float:
        """Time in the bubble over time at work."""
        stages, pipeline = config.mesh.pipeline, config.pipeline
        if stages == 1:
            return 0.0
        both_ways = pipeline.schedule == "1f1b"
        return _idle(self.repeats, stages, pipeline.laps, config.train.accumulation, both_ways)


@functools.lru_cache(maxsize=4096)
def _idle(repeats: int, stages: int, laps: int, microbatches: int, both_ways: bool) -> float:
    bubble = Schedule(repeats, stages, laps, microbatches, both_ways).bubble_fraction()
    return bubble / (1 - bubble)


def _inner(config: RunConfig) -> tuple[int, ...]:
    return (*(config.mesh.size(axis) for axis in INNER), beside_weights(config.mesh))
