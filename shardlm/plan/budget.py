"""What a run comes to: days and dollars of so many tokens."""

import dataclasses

from shardlm.plan.plan import Plan

DAY = 86_400.0


@dataclasses.dataclass(frozen=True)
class Budget:
    """A run's length and a GPU's price; 0 where it is not known.

    tokens  of the whole run
    dollars_per_gpu_hour  and `price_source` where it is from
    """

    tokens: float
    dollars_per_gpu_hour: float = 0.0
    price_source: str = ""

    def days(self, plan: Plan, step_seconds: float | None = None) -> float:
        """Of steps as long as estimated, or as said."""
        return self.tokens / plan.cost.tokens * (step_seconds or plan.step_seconds) / DAY

    def dollars(self, plan: Plan, step_seconds: float | None = None) -> float:
        return self.days(plan, step_seconds) * 24 * plan.cluster.num_gpus * self.dollars_per_gpu_hour
