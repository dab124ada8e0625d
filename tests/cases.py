"""Which tests are run: which cases of those with many are wide, what --cases leaves of each, and what begins within
--seconds (conftest.py)."""

import time
from collections.abc import Iterable

import pytest


def cases_of(items, first: int, step: int) -> set:
    """Every `step`-th case of each test, and one at least."""
    return {case for of in _tests(items) for case in of[first % min(step, len(of)) :: step]}


def make_wide(items) -> None:
    """Of a test that is marked sampled(n), n of the cases that are not wide stay so, spread over all; others are."""
    for of in _tests(item for item in items if not item.get_closest_marker("wide")):
        if mark := of[0].get_closest_marker("sampled"):
            (most,) = mark.args
            step = max(1, len(of) // most)
            kept = {i * len(of) // most + i % step for i in range(most)}  # not one value of a parameter alone
            for i, item in enumerate(of):
                if i not in kept:
                    item.add_marker("wide")


def _tests(items) -> Iterable[list]:
    """The cases of each."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests.values()


def begin_in_time(started: float, seconds: float | None) -> None:
    """Skips a test that would begin more than `seconds` after `started`, of time.monotonic."""
    if seconds is not None and time.monotonic() - started > seconds:
        pytest.skip(f"not begun within --seconds={seconds:g}")
