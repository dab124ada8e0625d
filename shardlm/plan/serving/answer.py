"""What the planner answers of serving: the ranked plans of a case, the best of them compiled."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.plan.apart import impossible
from shardlm.plan.asked import Say, silent
from shardlm.plan.serving.arrivals import Programs, times_of_requests
from shardlm.plan.serving.attainment import search_attained
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.change import Change, changes, more_gpus, told
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.search import DoesNotFit, Found, ServingPlan, search
from shardlm.plan.serving.time import Speed
from shardlm.plan.serving.verify import VerifiedServing, verify_apart


@dataclasses.dataclass(frozen=True)
class RankedServing:
    """A plan, and what compiling the engine's programs showed: None where they were not compiled."""

    plan: ServingPlan
    verified: VerifiedServing | None = None

    @property
    def fits(self) -> bool:
        """As compiled where that was done; every plan fits as estimated."""
        return self.verified is None or self.verified.fits(self.plan.memory.limit)

    @property
    def status(self) -> str:
        if self.verified is None:
            return "estimated"
        return "verified" if self.fits else "refused"

    @property
    def why(self) -> str:
        """It was refused; else ""."""
        if self.fits:
            return ""
        return self.verified.failure or "its programs need more memory than jax may take of a GPU"


@dataclasses.dataclass(frozen=True)
class ServingAnswer:
    """ranked      those whose compiled programs fit, then the others as estimated, those whose programs do not last
    unverified  why nothing could be compiled, where that was asked for; else ""
    """

    found: Found
    ranked: tuple[RankedServing, ...]
    unverified: str = ""

    @property
    def first(self) -> RankedServing:
        return self.ranked[0]

    @functools.cached_property
    def times(self) -> dict[str, Any]:
        """Of requests that come at random to a replica of the first plan (arrivals.times_of_requests)."""
        plan = self.first.plan
        return times_of_requests(Programs(Replica.of(plan.case, Speed.of(plan.case, plan.memory))), plan.usual)


def answer_serving(
    case: ServingCase,
    fixed: Mapping[str, int] = MappingProxyType({}),
    compiled: int = 0,
    say: Say = silent,
) -> ServingAnswer:
    """Searches, and compiles the `compiled` best, going on to the next ones until the programs of as many fit, or three
    times as many were tried. Raises ShardlmError as `search` does; where nothing fits, with the least change that would
    make it fit, compiled in the same way. What takes long is told to `say` as it begins."""
    unverified = impossible(case.cluster) if compiled else ""
    try:
        found = search_attained(case, fixed, say) if case.attainment else search(case, fixed)
    except DoesNotFit as error:
        raise ShardlmError(_with_remedy(error, case, fixed, compiled, unverified, say)) from None
    good: list[RankedServing] = []
    bad: list[RankedServing] = []
    left = list(found.plans)
    while left and not unverified and len(good) < compiled and len(good) + len(bad) < 3 * compiled:
        plan = left.pop(0)
        say(_compiling(plan))
        one = RankedServing(plan, verify_apart([plan])[0])
        (good if one.fits else bad).append(one)
    return ServingAnswer(found, (*good, *map(RankedServing, left), *bad), unverified)


def _compiling(plan: ServingPlan) -> str:
    return f"compiling the engine's programs of a replica on {plan.mesh} for {plan.case.cluster.gpu.name} ..."


def _with_remedy(
    error: DoesNotFit,
    case: ServingCase,
    fixed: Mapping[str, int],
    compiled: int,
    unverified: str,
    say: Say,
) -> str:
    """The error with the first change whose programs fit, and those before it whose programs do not."""
    possible, more = changes(case, fixed), more_gpus(case, fixed)
    if not compiled or unverified:
        why = f"estimated; nothing was verified: {unverified}" if unverified else "estimated"
        return told(error, next(possible, None), why, more)
    refused = []
    for change, one in _tried(possible, fixed, 3 * compiled, say):
        if one.fits:
            verified = one.verified
            limit, most = one.plan.memory.limit / 2**30, verified.fullest.total / 2**30
            basis = (
                f"verified: the programs of {one.plan.mesh} were compiled in {verified.seconds:.0f} s, and need "
                f"{most:.1f} of the {limit:.1f} GiB a GPU that jax may take"
            )
            return told(error, change, "; ".join([basis, *refused]), more)
        refused.append(f"{change.what}, which fits as estimated, was refused: {one.why}")
    return told(error, None, "", more) + "".join(f"; {one}" for one in refused)


def _tried(
    possible: Iterator[Change], fixed: Mapping[str, int], most: int, say: Say
) -> Iterator[tuple[Change, RankedServing]]:
    """At most so many changes with their best plans, compiled. One that makes it fit and not as fast as asked for has
    no plan."""
    for change in itertools.islice(possible, most):
        with contextlib.suppress(ShardlmError):
            plan = search(change.case, fixed).plans[0]
            say(f"with {change.what}: {_compiling(plan)}")
            yield change, RankedServing(plan, verify_apart([plan])[0])
