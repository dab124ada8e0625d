"""Serving plans by the share of requests that keep their latencies (the attainment of DistServe, https://arxiv.org/abs/
2401.09670, section 2.2) and not by means: the highest rate of a replica for which, of requests that come at random to
its own scheduler, as many do; the fewest replicas for a rate of all."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.plan.asked import Say
from shardlm.plan.serving.arrivals import Programs, keep_latencies, times_of_requests
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.load import Load, Replica
from shardlm.plan.serving.search import Found, ServingPlan, mesh_text, order, search
from shardlm.plan.serving.time import Speed

SLACK = 1.25  # a share of a half and more keeps latencies at no rate higher than the means do, by as much as those err
LEAST = 0.01  # of the most: all but idle
EXACT = 1.03  # two rates as near to each other are the same
MOST_TRIALS = 8  # of a replica that is not the best
STEP = 1.15  # from where a rate is looked for, up or down


def without_latencies(case: ServingCase) -> ServingCase:
    return dataclasses.replace(case, ttft_seconds=0.0, itl_seconds=0.0, attainment=0.0)


def search_attained(case: ServingCase, fixed: Mapping[str, int], say: Say) -> Found:
    """As search, for a case with an attainment. Meshes are looked at from the best without latencies on, as long as one
    may have more tokens of replies a GPU within them than those so far, or fewer GPUs for the rate asked for."""
    free = search(without_latencies(case), fixed)
    plans: list[ServingPlan] = []
    refused: list[tuple[MeshSpec, str]] = []
    for plan in free.plans:
        best = max((one.tokens_per_second_per_gpu for one in plans), default=0.0)
        fewest = min((one.num_gpus for one in plans), default=math.inf)
        least = plan.gpus_per_replica * math.ceil(case.request_rate / plan.most.rate)
        if plan.tokens_per_second_per_gpu <= best and (not case.request_rate or least >= fewest):
            most = f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s a GPU"
            refused.append(
                (plan.mesh, f"it sustains {most} at most, whatever the latencies, and others more within them")
            )
            continue
        say(f"requests at random on {plan.mesh} ...")
        trials = Trials(plan, dataclasses.replace(case, engine=plan.case.engine))  # its pages may be split
        rate = trials.highest()
        if not rate:
            refused.append((plan.mesh, trials.too_slow()))
            continue
        count = math.ceil(case.request_rate / rate) if case.request_rate else plan.case.engine.mesh.data
        plans.append(trials.plan_of(count, case.request_rate / count if case.request_rate else rate, rate))
    if not plans:
        raise ShardlmError(f"no mesh of {case.cluster.num_gpus} {case.cluster.gpu.name} will do: {refused[0][1]}")
    return Found(tuple(sorted(plans, key=order)), (*refused, *free.refused))


@dataclasses.dataclass(frozen=True)
class Fewest:
    """plan, times  of the mesh whose replicas serve the rate with the fewest GPUs; what came of its requests
    others   the best of replicas of other numbers of GPUs, the fewest in all first
    counted  of these others' numbers of GPUs those of which fewer replicas will not do; of the rest that is not known
    """

    plan: ServingPlan
    times: dict[str, Any]
    others: tuple[ServingPlan, ...]
    counted: frozenset[int]


def fewest_gpus(plans: Sequence[ServingPlan], say: Say) -> Fewest:
    """Of plans by means, on one cluster, those that serve the rate within the latencies. Meshes are looked at from the
    likeliest on, each as long as it may need fewer GPUs than the best so far. Raises ShardlmError where no mesh does.
    """
    tried = [(plan, Trials(ServingPlan.of(without_latencies(plan.case), plan.memory), plan.case)) for plan in plans]
    tried.sort(key=lambda one: one[1].likely_gpus())
    best: tuple[Trials, int] | None = None
    fewest, counts = math.inf, {}
    for plan, trials in tried:
        rate, each = plan.case.request_rate, plan.gpus_per_replica
        if each * rate / (SLACK * plan.most.rate) > fewest - 1:
            continue
        at_most = math.inf if best is None else (fewest - 1) // each
        say(f"requests at random on replicas of {mesh_text(plan.case.engine)} ...")
        if count := trials.fewest(rate, at_most):
            best, fewest = (trials, count), each * count
            counts[trials] = count
    if best is None:
        raise ShardlmError(tried[0][1].too_slow())
    trials, count = best
    rate = trials.case.request_rate
    while trials.times(rate / count)["within_limits"] < trials.case.attainment:  # `keep` differs from it by little
        count += 1
    plan = trials.plan_of(count, rate / count, rate / count)
    others = _others([one for _, one in tried], counts, plan)
    counted = frozenset(other.gpus_per_replica for other, is_counted in others if is_counted)
    return Fewest(plan, trials.times(rate / count), tuple(other for other, _ in others), counted)


def _others(
    tried: Sequence["Trials"], counts: Mapping["Trials", int], best: ServingPlan
) -> list[tuple[ServingPlan, bool]]:
    """(the likeliest of each other number of GPUs, whether its replicas were counted): else as many as will do, found
    in a few trials; none of those for which it takes more than MOST_TRIALS."""
    found: dict[int, tuple[ServingPlan, bool]] = {}
    for trials in sorted(tried, key=lambda one: one not in counts):
        size, rate = trials.plan.gpus_per_replica, trials.case.request_rate
        if size in (best.gpus_per_replica, *found):
            continue
        least = math.ceil(best.num_gpus / size)
        count, exact = (counts[trials], True) if trials in counts else trials.enough(rate, least)
        if count:
            found[size] = trials.plan_of(count, rate / count, rate / count), exact
    return sorted(found.values(), key=lambda one: (one[0].num_gpus, one[0].gpus_per_replica))


class Trials:
    """Requests that come at random to a replica of a plan, at one rate after another; what came of it is remembered."""

    def __init__(self, plan: ServingPlan, case: ServingCase):
        """`plan`: of `without_latencies(case)`, on the case's mesh."""
        self.plan, self.case = plan, case
        self._free = Replica.of(plan.case, Speed.of(plan.case, plan.memory))
        self._programs = Programs(dataclasses.replace(self._free, case=case))
        self._kept, self._failed = 0.0, math.inf  # the highest rate that did, the lowest that did not

    def keep(self, rate: float) -> bool:
        """Whether as many requests as are asked for keep the latencies; more of them do at a lower rate."""
        if self._kept < rate < self._failed:
            if keep_latencies(self._programs, self.load(rate)):
                self._kept = rate
            else:
                self._failed = rate
        return rate <= self._kept

    @functools.cache  # noqa: B019 - trials live as long as a search
    def times(self, rate: float) -> dict[str, Any]:
        """Of one request after another, streams too: what `keep` is quicker than, and differs from by little."""
        return times_of_requests(self._programs, self.load(rate))

    def load(self, rate: float) -> Load:
        return self._free.at(min(rate, self.plan.most.rate))

    def highest(self) -> float:
        """The highest rate at which they do, as exact as EXACT; 0 where there is none."""
        most = self.plan.most.rate
        low, rate, step = most * LEAST, self._guess(), STEP
        while self.keep(rate) and rate < most:
            rate, step = min(most, rate * step), step * step
        while self._kept < low and rate > low:
            rate, step = max(low, rate / step), step * step
            self.keep(rate)
        while self._kept and min(self._failed, most) / self._kept > EXACT:
            self.keep(math.sqrt(self._kept * min(self._failed, most)))
        rate = self._kept
        while rate and self.times(rate)["within_limits"] < self.case.attainment:
            rate /= math.sqrt(EXACT)
        return rate

    def fewest(self, rate: float, at_most: float = math.inf) -> int:
        """The fewest replicas that together do so at `rate` by `keep`, exactly or, of many, within EXACT; 0 where more
        than `at_most` are needed, or any number is too few."""
        least = math.ceil(rate / self.plan.most.rate)
        if least > at_most or (at_most < math.inf and not self.keep(rate / at_most)):
            return 0
        low, count, step = least - 1, max(least, math.ceil(rate / self._guess())), STEP
        count = int(min(count, at_most))
        while not self.keep(rate / count):
            if count > least / LEAST:
                return 0
            low, count, step = count, int(min(at_most, max(count + 1, count * step))), step * step
        step = STEP
        while count > least and self.keep(rate / (down := max(least, min(count - 1, int(count / step))))):
            count, step = down, step * step
        low = max(low, math.floor(rate / self._failed + 1e-9))
        while count - low > max(1, (EXACT - 1) * count):
            middle = (low + count) // 2
            low, count = (low, middle) if self.keep(rate / middle) else (middle, count)
        return count

    def likely_gpus(self) -> float:
        """For the case's rate."""
        return self.plan.gpus_per_replica * math.ceil(self.case.request_rate / self._guess())

    def enough(self, rate: float, least: int) -> tuple[int, bool]:
        """(replicas that do so at `rate`, a quarter more than need be at most; whether one fewer does not), where fewer
        than `least` do not; 0 where MOST_TRIALS find none."""
        least = count = max(least, math.ceil(rate / self.plan.most.rate))
        failed = least - 1
        for _ in range(MOST_TRIALS):
            if self.keep(rate / count):
                return count, count == failed + 1
            failed, count = count, max(count + 1, math.ceil(1.25 * count))
        return 0, False

    def plan_of(self, count: int, usual: float, most: float) -> ServingPlan:
        """The plan on so many replicas, each at the rate `usual`, of at most `most`."""
        limit = self.plan.most.limit if most == self.plan.most.rate else "attainment"
        highest = dataclasses.replace(self.load(most), limit=limit)
        return dataclasses.replace(self.plan, case=self.case, most=highest, usual=self.load(usual), replicas=count)

    def too_slow(self) -> str:
        case, alone = self.case, self.times(self.plan.most.rate * LEAST)
        first, further = alone["ttft_seconds"]["p50"], alone["tpot_seconds"].get("p50", 0.0)
        return (
            f"a replica on {mesh_text(case.engine)} gives {alone['within_limits']:.1%} of requests the latencies "
            f"asked for where hardly any run at once, and attainment={case.attainment:g}: half of the first tokens "
            f"come within {first:.3g} s, further ones every {further:.3g} s (estimated). Ask for longer ones"
        )

    @functools.cache  # noqa: B019 - trials live as long as a search
    def _guess(self) -> float:
        """A rate to begin with: where the fluid's waits, as much longer as the slowest that must be in time are in
        M/D/1 queues (6.4 times the mean for 99 of 100, 3.2 for 90), leave as much time as is asked for."""
        case, free, most = self.case, self._free, self.plan.most
        idle, late = free.at(LEAST * most.rate), -math.log(1 - case.attainment)

        def kept(load: Load) -> bool:
            first = idle.ttft_seconds + 1.4 * late * (load.ttft_seconds - idle.ttft_seconds)
            further = load.itl_seconds + 0.05 * late * (load.itl_seconds - idle.itl_seconds)
            return first <= (case.ttft_seconds or math.inf) and further <= (case.itl_seconds or math.inf)

        return max(LEAST * most.rate, min(most.rate, free.running(free.largest(kept, float(free.slots))).rate))
