"""What the planner answers of serving: the ranked plans of a case, the best of them compiled."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from shardlm.plan.apart import impossible
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.search import Found, ServingPlan, search
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


def answer_serving(
    case: ServingCase, fixed: Mapping[str, int] = MappingProxyType({}), compiled: int = 0
) -> ServingAnswer:
    """Searches, and compiles the `compiled` best, going on to the next ones until the programs of as many fit, or three
    times as many were tried. Raises ShardlmError as `search` does."""
    found = search(case, fixed)
    unverified = impossible(case.cluster) if compiled else ""
    good: list[RankedServing] = []
    bad: list[RankedServing] = []
    left = list(found.plans)
    while left and not unverified and len(good) < compiled and len(good) + len(bad) < 3 * compiled:
        plan = left.pop(0)
        one = RankedServing(plan, verify_apart([plan])[0])
        (good if one.fits else bad).append(one)
    return ServingAnswer(found, (*good, *map(RankedServing, left), *bad), unverified)
