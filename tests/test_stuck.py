"""A run in which nothing goes on any more ends, and says where."""

import sys
import threading
import time
import types

import pytest
from job import two_processes

from shardlm import life
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


@pytest.fixture
def later(monkeypatch):
    """[seconds that the clock is ahead]"""
    ahead = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    for module in ("shardlm.life", "shardlm.train.stuck"):
        monkeypatch.setattr(sys.modules[module], "time", clock)
    monkeypatch.setattr(life, "_last", 0.0)
    return ahead


def test_a_sign_of_life_gives_a_part_its_time_anew(later):
    """A validation of many batches may take longer in all."""
    ended = threading.Event()
    patience = Patience(60.0, lambda status: ended.set(), wait=0.1)
    patience.begin(0, "evaluation")
    for _ in range(3):
        later[0] += 50.0
        life.alive()
    assert patience._quiet(patience._now, life.last() + 5) == 5
    patience.close()
    assert not ended.is_set()


def test_files_that_grow_are_a_sign_of_life(tmp_path, monkeypatch):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_text("part")
    assert life._size(tmp_path) == 4 and life._size(tmp_path / "none") == 0
    looked, signs, sizes = threading.Event(), [], iter([4, 4, 9, 9, 0, 0])

    def size(directory):
        if (found := next(sizes, None)) is None:
            looked.set()
        return found or 0

    monkeypatch.setattr(life, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(life, "_size", size)
    monkeypatch.setattr(life, "alive", lambda: signs.append(1))
    with life.while_growing(tmp_path):
        assert looked.wait(60)
    assert len(signs) == 2  # where it grew, and where it was moved


def test_a_process_that_was_stopped_itself_has_its_time_anew(later):
    """As by a scheduler that suspends jobs: the clock goes on meanwhile."""
    ended = threading.Event()
    patience = Patience(3.0, lambda status: ended.set(), wait=0.1)
    patience.begin(0, "step")
    later[0] = 3600.0
    while not life.last():
        time.sleep(0.01)
    patience.done()
    patience.close()
    assert not ended.is_set()


@pytest.mark.parametrize("hangs", ["print", "key_value"])
def test_what_the_process_hangs_in_may_be_what_tells(hangs, monkeypatch):
    """The pipe that its output goes to, or what other processes are asked by; and it is not waited for at the end."""
    ended, goes_on = threading.Event(), threading.Event()
    wait = lambda *_, **__: goes_on.wait(60)  # noqa: E731
    if hangs == "print":
        monkeypatch.setattr(Patience, "_tell", wait)
    else:
        monkeypatch.setattr("shardlm.train.stuck._of_all", wait)
    patience = Patience(0.05, lambda status: ended.set(), wait=0.01)
    patience.begin(3, "step")
    assert ended.wait(30)
    patience.close()
    goes_on.set()


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
