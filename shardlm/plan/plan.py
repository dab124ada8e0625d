"""The plan of a run on a mesh: what it holds, sends and computes, how long a step takes and whether it fits. An
estimate from formulas; verify.py compiles."""

import dataclasses

from shardlm.flops import mfu
from shardlm.hardware import Gpu
from shardlm.plan.cluster import Cluster
from shardlm.plan.cost import StepCost, step_cost
from shardlm.plan.memory import Memory, memory
from shardlm.plan.sketch import Sketch
from shardlm.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """Estimates for one configuration."""

    sketch: Sketch
    cluster: Cluster
    memory: Memory
    cost: StepCost

    @classmethod
    def of(cls, config: RunConfig, cluster: Cluster) -> "Plan":
        """Of a configuration whose mesh has every size. Raises ShardlmError for what cannot run at all; what is merely
        too large has a plan that does not fit."""
        sketch = Sketch.of(config, cluster.gpu)
        return cls(sketch, cluster, memory(sketch), step_cost(sketch, cluster))

    @property
    def config(self) -> RunConfig:
        return self.sketch.config

    @property
    def gpu(self) -> Gpu:
        return self.cluster.gpu

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.gpu.hbm_bytes

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation by the convention of flops.py, against the 16-bit peak."""
        return mfu(self.cost.model_flops, self.cost.step_seconds, self.gpu.peak.bf16, self.cluster.num_gpus)
