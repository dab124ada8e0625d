"""What --cases leaves of tests: one case of each at least, and all of them in as many runs as it leaves parts. What
--seconds leaves: those that begin in time."""

import time

import pytest
from cases import begin_in_time, cases_of

NAMES = [
    "a.py::test_one",
    *(f"a.py::test_two[{i}]" for i in range(2)),
    *(f"b.py::test_many[x[{i}]]" for i in range(11)),
]


def test_every_case_has_its_turn():
    items = [type("Item", (), {"nodeid": name})() for name in NAMES]
    parts = [{item.nodeid for item in cases_of(items, first, 4)} for first in range(7, 11)]
    assert set.union(*parts) == set(NAMES)
    for part in parts:
        assert {name.partition("[")[0] for name in part} == {"a.py::test_one", "a.py::test_two", "b.py::test_many"}
        assert len(part) <= 1 + 1 + 3


def test_what_would_begin_late_is_skipped_and_says_so():
    now = time.monotonic()
    begin_in_time(now - 1000, None)
    begin_in_time(now, 600)
    with pytest.raises(pytest.skip.Exception, match="not begun within --seconds=600"):
        begin_in_time(now - 601, 600)
