"""A run in which nothing goes on any more ends, and says where."""

import threading

import pytest
from job import two_processes

from shardlm.metrics.goodput import Goodput
from shardlm.train.stuck import Patience, describe


def test_what_takes_too_long_ends_the_process_and_is_named(capfd, tmp_path):
    ended, statuses = threading.Event(), []

    def end(status):
        statuses.append(status)
        ended.set()

    with Goodput(tmp_path, 6, 0.0, watch=Patience(0.05, end)) as goodput, goodput.measure("data"):
        assert ended.wait(60)
    said = capfd.readouterr().err
    assert statuses == [1]
    assert "reading rows, step 7. Where the threads of this process stand is above" in said
    assert "(train.stuck_seconds=0.05): process 0 for " in said
    assert "test_stuck.py" in said, "where the main thread stands"


def test_what_goes_on_is_left_alone(tmp_path):
    """Parts that end in time, what is between them, and compiling, which may take as long as it does."""
    ended = threading.Event()
    with Goodput(tmp_path, 0, 0.0, watch=Patience(0.1, lambda status: ended.set())) as goodput:
        with goodput.measure("step"):
            pass
        assert not ended.wait(0.3)
        with goodput.measure("compile"):
            assert not ended.wait(0.3)


def test_processes_that_do_the_same_are_named_together():
    waiting = {"step": 11, "part": "step", "seconds": 1801.0}
    said = dict.fromkeys((0, 1, 2, 4, 6), waiting) | {5: {"step": 11, "part": "data", "seconds": 1830.0}}
    text = describe(said, 8, 1800)
    assert "process 5 for 30:30 reading rows, step 12; " in text
    assert "processes 0-2, 4, 6 for 30:01 in a step of the devices, step 12; processes 3, 7 said nothing. " in text


@pytest.mark.parametrize("hanging", [pytest.param(0, marks=pytest.mark.wide), 1])
def test_a_job_whose_process_hangs_ends_and_names_it(hanging):
    """The one that coordinates or another."""
    both = two_processes("hanging", str(hanging))
    assert [one.returncode for one in both] == [1, 1], both
    for one in both:
        assert f"process {hanging} for " in one.stderr and f"process {1 - hanging} for " in one.stderr, one.stderr
        assert one.stderr.index("reading rows, step 12") < one.stderr.index("in a step of the devices, step 12")
