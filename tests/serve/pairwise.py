"""A covering array: few cases in which every pair of values of two different factors meets."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Mapping[str, Any]) -> set:
    """The pairs of values that meet in a case."""
    return set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def covering(
    factors: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool] = lambda case: True
) -> tuple[list[Case], set]:
    """(cases that cover every pair that can meet, the pairs that cannot), the same each time: a case is begun by a
    pair that is still missing and filled up, factor by factor, with what meets most missing ones. `possible` says
    whether a case, of all factors or some, may stand: what it refuses stays refused with more factors."""
    missing, never, cases = set(), set(), []
    for (a, values), (b, others) in itertools.combinations(sorted(factors.items()), 2):
        for pair in itertools.product(values, others):
            case = dict(zip((a, b), pair, strict=True))
            (missing if possible(case) else never).update(pairs_of(case))
    while missing:
        case = dict(min(missing, key=repr))
        for name in sorted(factors, key=lambda name: (-len(factors[name]), name)):
            if name in case:
                continue
            fits = [value for value in factors[name] if possible({**case, name: value})]
            if not fits:
                raise ValueError(f"no value of {name} goes with {case}")
            turn = len(cases) % len(fits)  # of values that are as good as each other, another one in each case
            case[name] = max(
                fits[turn:] + fits[:turn], key=lambda value: len(pairs_of({**case, name: value}) & missing)
            )
        missing -= pairs_of(case)
        cases.append(case)
    return cases, never
