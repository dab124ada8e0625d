"""What --cases leaves of tests: one case of each at least, and all of them in as many runs as it leaves parts. What
--seconds leaves: those that begin in time. And which cases of a sampled test are wide."""

import time

import pytest
from cases import begin_in_time, cases_of, make_wide

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


def test_some_cases_of_a_sampled_test_stay_and_the_others_are_wide():
    class Item:
        def __init__(self, nodeid, *marks):
            self.nodeid, self.marks = nodeid, {mark.name: mark for mark in marks}

        def get_closest_marker(self, name):
            return self.marks.get(name)

        def add_marker(self, name):
            self.marks[name] = True

    sampled, wide = pytest.mark.sampled(3).mark, pytest.mark.wide.mark
    items = [Item(f"a.py::test_many[{i}]", sampled, *[wide] * (i == 0)) for i in range(8)]
    items += [Item("a.py::test_one"), *(Item(f"a.py::test_few[{i}]", sampled) for i in range(2))]
    make_wide(items)
    stay = ["a.py::test_many[1]", "a.py::test_many[4]", "a.py::test_many[5]"]
    assert [item.nodeid for item in items if "wide" not in item.marks] == [*stay, *(item.nodeid for item in items[8:])]


def test_what_would_begin_late_is_skipped_and_says_so():
    now = time.monotonic()
    begin_in_time(now - 1000, None)
    begin_in_time(now, 600)
    with pytest.raises(pytest.skip.Exception, match="not begun within --seconds=600"):
        begin_in_time(now - 601, 600)
