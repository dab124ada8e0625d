"""A covering array: few cases in which every pair of values of two different factors meets."""

import collections
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def pairs_of(case: Mapping[str, Any]) -> set:
    """The pairs of values that meet in a case."""
    return set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def covering(
    factors: Mapping[str, Sequence[Any]],
    possible: Callable[[Case], bool] = lambda case: True,
    cost: Callable[[Case], float] = lambda case: 1,
    tries: int = 1,
) -> tuple[list[Case], set]:
    """(cases that cover every pair that can meet, the pairs that cannot), the same each time, of `tries` drawn ones,
    each made cheaper, those of the least cost. `possible` says whether a case, of all factors or some, may stand: what
    it refuses stays refused with more factors."""
    pairs, never = set(), set()
    for (a, values), (b, others) in itertools.combinations(sorted(factors.items()), 2):
        for pair in itertools.product(values, others):
            case = dict(zip((a, b), pair, strict=True))
            (pairs if possible(case) else never).update(pairs_of(case))
    drawn = (_drawn(factors, possible, pairs, random.Random(seed)) for seed in range(tries))
    best = min((_cheaper(cases, factors, possible, cost) for cases in drawn), key=lambda cases: sum(map(cost, cases)))
    assert pairs <= set().union(*map(pairs_of, best))
    return best, never


def _drawn(factors: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool], pairs: set, rng) -> list[Case]:
    """A case is begun by a pair that is still missing and filled up, factor by factor, those of many values first, with
    what meets most missing ones; of what is as good as each other any."""
    missing, cases = sorted(pairs, key=repr), []
    while missing:
        case = dict(rng.choice(missing))
        for name in sorted(factors, key=lambda name: (-len(factors[name]), rng.random())):
            if name in case:
                continue
            fits = [value for value in factors[name] if possible({**case, name: value})]
            if not fits:
                raise ValueError(f"no value of {name} goes with {case}")
            rng.shuffle(fits)
            left = set(missing)
            case[name] = max(fits, key=lambda value: len(pairs_of({**case, name: value}) & left))
        missing = [pair for pair in missing if pair not in pairs_of(case)]
        cases.append(case)
    return cases


def _cheaper(
    cases: list[Case],
    factors: Mapping[str, Sequence[Any]],
    possible: Callable[[Case], bool],
    cost: Callable[[Case], float],
) -> list[Case]:
    """The cases without those, and with values that cost less in place of those, whose pairs others have too."""
    cases = list(cases)
    there = collections.Counter(pair for case in cases for pair in pairs_of(case))
    alone = lambda case, new=(): [pair for pair in pairs_of(case) - set(new) if there[pair] == 1]  # noqa: E731
    changed = True
    while changed:
        changed = False
        for case in [case for case in cases if not alone(case)]:
            if not alone(case):
                there.subtract(pairs_of(case))
                cases.remove(case)
        for i, (name, values) in itertools.product(range(len(cases)), factors.items()):
            for value in values:
                new = {**cases[i], name: value}
                if cost(new) < cost(cases[i]) and possible(new) and not alone(cases[i], pairs_of(new)):
                    there.subtract(pairs_of(cases[i]))
                    there.update(pairs_of(new))
                    cases[i], changed = new, True
    return cases
