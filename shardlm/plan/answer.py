"""What the planner answers: the ranked plans of a configuration or what would make it fit, the best of them compiled,
and what a run costs."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

from shardlm.plan.apart import impossible
from shardlm.plan.asked import Say, silent
from shardlm.plan.budget import Budget
from shardlm.plan.change import Change, changes
from shardlm.plan.cluster import Cluster
from shardlm.plan.compile_time import too_long
from shardlm.plan.constraints import FREE, Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.ranked import Ranked
from shardlm.plan.search import ROOM, Found, search
from shardlm.plan.training_images import RowImages
from shardlm.plan.verify import verify
from shardlm.plan.without_loop import refined
from shardlm.topology import chip_of
from shardlm.train.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Answer:
    """All that is said of a configuration on a cluster.

    ranked   those whose compiled programs fit, the fastest as compiled first; then the others, the fastest as
             estimated first; those whose programs do not fit last
    changes  where nothing fits: what would make it fit, those first whose compiled programs do, the least intrusive
             before the others; those whose programs do not last
    unverified  why nothing could be compiled, where that was asked for; else ""
    search_seconds  that looking at all of it took, without compiling
    """

    cluster: Cluster
    constraints: Constraints
    found: Found
    ranked: tuple[Ranked, ...]
    changes: tuple[Change, ...]
    budget: Budget
    unverified: str = ""
    search_seconds: float = 0.0

    @property
    def best(self) -> Ranked | None:
        return self.ranked[0] if self.ranked and self.ranked[0].fits else None


def answer(
    config: RunConfig,
    cluster: Cluster,
    constraints: Constraints = FREE,
    *,
    compiled: int = 0,
    patience: float = math.inf,
    budget: Budget | None = None,
    images: RowImages | None = None,
    say: Say = silent,
) -> Answer:
    """Searches, for rows with `images`, and compiles the `compiled` best, going on to the next ones until as many fit
    as compiled, and the best of them without its loop over layers; where nothing fits, the changes that would make it
    fit in the same way. What takes long is told to `say` as it begins. Nothing is compiled where a program is foreseen
    to take longer than `patience`, in seconds of a core.

    Raises ShardlmError where nothing can run at all.
    """
    started = time.perf_counter()
    found = search(config, cluster, constraints, images=images)
    seconds = time.perf_counter() - started
    first = next(iter(found.plans), found.smallest)
    unverified = (too_long(first.sketch, patience) or impossible(cluster)) if compiled else ""
    count = 0 if unverified else compiled
    ranked = refined(_compiled(found.plans or _nearly(found, count), count, say), constraints, say)
    train = config.train
    budget = budget or Budget(float(train.steps) * train.global_batch * train.seq_len)
    fits = any(one.fits for one in ranked)
    remedies = () if fits else _proved(changes(config, cluster, constraints, images), count, say)
    return Answer(cluster, constraints, found, ranked, remedies, budget, unverified, seconds)


def _nearly(found: Found, count: int) -> tuple[Plan, ...]:
    """The smallest plan where none fits and it exceeds the GPU by no more than formulas may be wrong by: whether it
    does is for the compiler to say, of `count` programs."""
    plan = found.smallest
    return (plan,) if count and plan and plan.memory.total <= (1 + ROOM) * plan.gpu.hbm_bytes else ()


def _proved(found: Sequence[Change], count: int, say: Say) -> tuple[Change, ...]:
    """Changes one after another compiled, until the programs of `count` fit or three times as many were tried. What
    GPUs cannot be compiled for stays an estimate."""
    good: list[Change] = []
    bad: list[Change] = []
    left: list[Change] = []
    for one in found:
        if len(good) == count or len(good) + len(bad) == 3 * count or not chip_of(one.plan.gpu):
            left.append(one)
            continue
        say(f"compiling {one.what}: {one.plan.config.mesh} ...")
        tried = dataclasses.replace(one, verified=verify([one.plan])[0])
        (good if tried.ranked.fits else bad).append(tried)
    return (*good, *left, *bad)


def _compiled(plans: Sequence[Plan], count: int, say: Say) -> tuple[Ranked, ...]:
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
        say(f"compiling for {batch[0].gpu.name}: {' and '.join(str(plan.config.mesh) for plan in batch)} ...")
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
