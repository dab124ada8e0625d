"""What if, of serving: one thing varied - the hardware, a length, a rate, a latency, an option of the engine - and the
best plan for each of its values. Estimates; what they are as text and as data is sweep_output.py's."""

import dataclasses
import time
from collections.abc import Iterable, Mapping

from shardlm.errors import ShardlmError
from shardlm.plan.asked import Say, silent
from shardlm.plan.serving.attainment import search_attained
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.change import changes, more_gpus, told
from shardlm.plan.serving.search import DoesNotFit, ServingPlan, search


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one value asks for; `fixed` are sizes of axes that are not searched."""

    value: str
    case: ServingCase
    fixed: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """The best plan of a value, or why there is none."""

    asked: Asked
    plan: ServingPlan | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class ServingSweep:
    """field    that is varied
    seconds  that it took
    """

    field: str
    rows: tuple[Row, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(row.plan for row in self.rows)


def sweep_serving(field: str, every: Iterable[Asked], say: Say = silent) -> ServingSweep:
    """One row for each value, all of which are read before any is searched, so that a wrong one is said at once."""
    start = time.perf_counter()
    return ServingSweep(field, tuple([_best(field, one, say) for one in list(every)]), time.perf_counter() - start)


def _best(field: str, asked: Asked, say: Say) -> Row:
    case, fixed = asked.case, asked.fixed
    say(f"{field}={asked.value} ...")
    try:
        found = search_attained(case, fixed, say) if case.attainment else search(case, fixed)
    except DoesNotFit as error:
        return Row(asked, None, told(error, next(changes(case, fixed), None), "estimated", more_gpus(case, fixed)))
    except ShardlmError as error:
        return Row(asked, None, str(error))
    return Row(asked, found.plans[0])
