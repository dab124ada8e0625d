"""The plan of a run on a mesh: what it holds, sends and computes, how long a step takes and whether it fits. An
estimate from formulas; verify.py compiles."""

import dataclasses
import functools

from shardlm.flops import mfu
from shardlm.hardware import Gpu
from shardlm.plan.alike import Alike
from shardlm.plan.cluster import Cluster
from shardlm.plan.cost import Layers, StepCost, at_least_seconds, step_cost
from shardlm.plan.memory import Memory, at_least, memory, total
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import State, state
from shardlm.plan.temporaries import Throughout, throughout
from shardlm.plan.training_images import RowImages
from shardlm.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimates for one configuration; each is made when it is first asked for.

    known  what other plans of the same search came to; None: there are no others
    """

    sketch: Sketch
    cluster: Cluster
    known: Alike | None = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls, config: RunConfig, cluster: Cluster, known: Alike | None = None, images: RowImages | None = None
    ) -> "Plan":
        """Of a configuration whose mesh has every size. Raises ShardlmError for what cannot run at all; what is merely
        too large has a plan that does not fit. `images` of each row, where `known` does not know of them."""
        sketch = known.sketch(config) if known else Sketch.of(config, cluster.gpu, cluster.gpus_per_host, images)
        return cls(sketch, cluster, known)

    @functools.cached_property
    def state(self) -> State:
        return self.sketch.once(state)

    @functools.cached_property
    def memory(self) -> Memory:
        return memory(self.sketch)

    @functools.cached_property
    def _held(self) -> Throughout:
        return self.sketch.once(throughout)

    @functools.cached_property
    def cost(self) -> StepCost:
        return step_cost(self.sketch, self.cluster, self._layers)

    @functools.cached_property
    def _layers(self) -> Layers:
        return self.known.layers(self.sketch) if self.known else Layers.of(self.sketch, self.cluster)

    @property
    def config(self) -> RunConfig:
        return self.sketch.config

    @property
    def gpu(self) -> Gpu:
        return self.cluster.gpu

    @functools.cached_property
    def fits(self) -> bool:
        # Nine of ten that do not fit are known at half of what their memory takes.
        if self.state_too_large or at_least(self.sketch, self.state, self._held) > self.gpu.hbm_bytes:
            return False
        return total(self.sketch) <= self.gpu.hbm_bytes

    @property
    def state_too_large(self) -> bool:
        """Whether what rests alone is more than the GPU has, however a step is run."""
        return self.state.total > self.gpu.hbm_bytes

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds

    @functools.cached_property
    def least_seconds(self) -> float:
        """No more than `step_seconds`, in a fraction of the time."""
        return at_least_seconds(self.sketch, self.cluster, self._layers)

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation by the convention of flops.py, against the 16-bit peak."""
        return mfu(self.cost.model_flops, self.step_seconds, self.gpu.peak.bf16, self.cluster.num_gpus)
