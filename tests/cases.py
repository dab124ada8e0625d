"""Which tests are run: what --cases leaves of a test's cases, and those that begin within --seconds (conftest.py)."""

import time

import pytest


def cases_of(items, first: int, step: int) -> set:
    """Every `step`-th case of each test, and one at least."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {case for of in tests.values() for case in of[first % min(step, len(of)) :: step]}


def begin_in_time(started: float, seconds: float | None) -> None:
    """Skips a test that would begin more than `seconds` after `started`, of time.monotonic."""
    if seconds is not None and time.monotonic() - started > seconds:
        pytest.skip(f"not begun within --seconds={seconds:g}")
