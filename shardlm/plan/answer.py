"""What the planner answers: the ranked plans of a configuration, the best of them compiled, and what a run costs."""

import dataclasses
from collections.abc import Mapping, Sequence

from shardlm.plan.change import Change, changes
from shardlm.plan.cluster import Cluster
from shardlm.plan.constraints import FREE, Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.search import Found, search
from shardlm.plan.verify import Verified, impossible, verify
from shardlm.train.config import RunConfig

DAY = 86_400.0


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A plan, and what compiling it showed: None where it was not compiled."""

    plan: Plan
    verified: Verified | None = None

    @property
    def fits(self) -> bool:
        """As compiled where it was, with the same reserve; not where there is no program; else as estimated."""
        if self.verified is None:
            return self.plan.fits
        return (
            not self.verified.failure and self.verified.hbm_bytes + self.plan.memory.reserve <= self.plan.gpu.hbm_bytes
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """A run's length and a GPU's price; 0 where it is not known.

    tokens  of the whole run
    dollars_per_gpu_hour  and `price_source` where it is from
    """

    tokens: float
    dollars_per_gpu_hour: float = 0.0
    price_source: str = ""

    def days(self, plan: Plan) -> float:
        return self.tokens / plan.cost.tokens_per_second / DAY

    def dollars(self, plan: Plan) -> float:
        return self.days(plan) * 24 * plan.cluster.num_gpus * self.dollars_per_gpu_hour


@dataclasses.dataclass(frozen=True)
class Answer:
    """All that is said of a configuration on a cluster.

    ranked   those whose compiled programs fit, the fastest as compiled first; then the others, the fastest as
             estimated first; those whose programs do not fit last
    changes  where nothing fits: what would make it fit
    unverified  why nothing could be compiled, where that was asked for; else ""
    """

    cluster: Cluster
    constraints: Constraints
    found: Found
    ranked: tuple[Ranked, ...]
    changes: tuple[Change, ...]
    budget: Budget
    unverified: str = ""

    @property
    def best(self) -> Ranked | None:
        return self.ranked[0] if self.ranked and self.ranked[0].fits else None


def answer(
    config: RunConfig,
    cluster: Cluster,
    constraints: Constraints = FREE,
    *,
    compiled: int = 0,
    budget: Budget | None = None,
) -> Answer:
    """Searches, and compiles the `compiled` best, going on to the next ones until as many fit as compiled.

    Raises ShardlmError where nothing can run at all.
    """
    found = search(config, cluster, constraints)
    unverified = impossible(cluster) if compiled else ""
    ranked = _compiled(found.plans, 0 if unverified else compiled)
    train = config.train
    budget = budget or Budget(float(train.steps) * train.global_batch * train.seq_len)
    remedies = () if any(one.fits for one in ranked) else tuple(changes(config, cluster, constraints))
    return Answer(cluster, constraints, found, ranked, remedies, budget, unverified)


def _compiled(plans: Sequence[Plan], count: int) -> tuple[Ranked, ...]:
    """The plans with `count` of them compiled that fit; a plan whose program does not fit goes behind all others, and
    so do those of its kind that would not fit with as much more than estimated. After three times as many compiled it
    is left at that."""
    good: list[Ranked] = []
    bad: list[Ranked] = []
    left, doubted, tried = list(plans), [], 0
    more: dict[tuple, float] = {}
    while left and len(good) < count and tried < 3 * count:
        batch, left = left[: min(2, count - len(good))], left[min(2, count - len(good)) :]
        tried += len(batch)
        for plan, verified in zip(batch, verify(batch), strict=True):
            one = Ranked(plan, verified)
            (good if one.fits else bad).append(one)
            if not verified.failure:
                more[_kind(plan)] = verified.hbm_bytes / (plan.memory.total - plan.memory.reserve)
        doubted += [plan for plan in left if not _would_fit(plan, more)]
        left = [plan for plan in left if _would_fit(plan, more)]
    good.sort(key=lambda one: one.verified.step.step_seconds)
    return (*good, *map(Ranked, left), *map(Ranked, doubted), *bad)


def _kind(plan: Plan) -> tuple:
    """Plans whose estimates of memory are wrong alike."""
    config = plan.config
    return config.remat, plan.sketch.passes > 1, config.mesh.pipeline > 1, config.mesh.context > 1


def _would_fit(plan: Plan, more: Mapping[tuple, float]) -> bool:
    """With as much more than estimated as a compiled plan of its kind needed."""
    memory = plan.memory
    needed = (memory.total - memory.reserve) * max(1.0, more.get(_kind(plan), 1.0)) + memory.reserve
    return needed <= plan.gpu.hbm_bytes
