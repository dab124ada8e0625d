"""Goodput: the pure summary against hand-made histories and by its invariants; the recorder across a kill."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlm.metrics.goodput import CATEGORIES, MEASURED, Goodput, summarise
from shardlm.metrics.jsonl import read


def start(time, step):
    return {"event": "start", "time": time, "step": step}


def spent(time, step, /, **seconds):
    return {"event": "spent", "time": time, "step": step, "seconds": seconds}


def stop(time, step):
    return {"event": "stop", "time": time, "step": step}


def test_one_session():
    summary = summarise([start(0, 0), spent(10, 0, init=10), spent(30, 10, compile=4, step=15), stop(30, 10)])
    assert summary.seconds == dict.fromkeys(CATEGORIES, 0.0) | {
        "init": 10,
        "compile": 4,
        "step": 15,
        "other": 1,
    }
    assert summary.goodput == 0.5 and summary.sessions == 1 and summary.lost_steps == 0
    assert str(summary) == "goodput 50.0% of 0:30 (init 33.3%, compile 13.3%, other 3.3%)"


def test_a_killed_session_loses_its_steps_after_the_checkpoint_and_the_time_until_the_next_start():
    history = [start(0, 0), spent(10, 10, step=10), spent(30, 30, step=20)]  # the last checkpoint was at 20
    resumed = [start(50, 20), spent(60, 30, step=10)]
    summary = summarise(history + resumed)
    assert summary.lost_steps == 10
    assert {name: s for name, s in summary.seconds.items() if s} == {"step": 30, "lost": 10, "down": 20}
    assert summary.goodput == 0.5
    assert "2 starts, 10 steps repeated" in str(summary)


def test_a_later_session_from_an_older_checkpoint_loses_what_stood_before():
    history = [start(0, 0), spent(10, 10, step=10), start(10, 10), spent(20, 20, step=10)]
    summary = summarise([*history, start(20, 5), spent(40, 25, step=20)])
    assert summary.lost_steps == 5 + 10
    assert summary.seconds["lost"] == 15 and summary.seconds["step"] == 25


def test_a_pause_on_purpose_is_not_counted():
    history = [start(0, 0), spent(10, 10, step=10), stop(10, 10)]
    assert summarise([*history, start(1000, 10), spent(1010, 20, step=10)]).goodput == 1.0


def test_nothing_yet():
    assert summarise([]).fractions == dict.fromkeys(CATEGORIES, 0.0) | {"other": 1.0}


@st.composite
def histories(draw):
    """Sessions that measure some of their time and resume somewhere before where the last one got to."""
    events, now, step = [], 0.0, 0
    for _ in range(draw(st.integers(1, 4))):
        now += draw(st.floats(-5, 100))  # clocks of two machines differ
        step = draw(st.integers(0, step))
        events.append(start(now, step))
        for _ in range(draw(st.integers(0, 4))):
            seconds = draw(st.dictionaries(st.sampled_from(MEASURED), st.floats(0, 20)))
            now += sum(seconds.values()) + draw(st.floats(0, 5))
            step += draw(st.integers(0, 50))
            events.append(spent(now, step, **seconds))
        if draw(st.booleans()):
            events.append(stop(now, step))
    return events


@given(histories())
def test_shares_sum_to_one_and_steps_are_never_invented(history):
    summary = summarise(history)
    assert sum(summary.fractions.values()) == pytest.approx(1)
    assert set(summary.seconds) == set(CATEGORIES)
    assert all(seconds >= -1e-9 for seconds in summary.seconds.values())
    stepping = sum(event.get("seconds", {}).get("step", 0.0) for event in history)
    assert summary.seconds["step"] + summary.seconds["lost"] == pytest.approx(stepping)


@given(histories())
def test_steps_that_stand_are_those_that_the_last_session_reached(history):
    summary = summarise(history)
    done = sum(b["step"] - a["step"] for a, b in itertools.pairwise(history) if b["event"] != "start")
    assert done - summary.lost_steps <= history[-1]["step"]
    if history[0]["step"] == 0:
        assert done - summary.lost_steps == history[-1]["step"]


def test_the_recorder_survives_a_kill(tmp_path, monkeypatch):
    clock = iter(range(1000, 2000))
    monkeypatch.setattr("shardlm.metrics.goodput.time.time", lambda: float(next(clock)))
    monkeypatch.setattr("shardlm.metrics.goodput.time.monotonic", lambda: float(next(clock)))
    first = Goodput(tmp_path, step=0, started=990.0)
    for step in range(1, 4):
        with first.measure("step"):
            pass
        first.step_done(step)
    first.flush()
    with open(tmp_path / "goodput.jsonl", "ab") as file:
        file.write(b'{"event": "spe')  # killed here
    with Goodput(tmp_path, step=2, started=1100.0) as second, second.measure("checkpoint"):
        pass
    summary = summarise(read(tmp_path / "goodput.jsonl"))
    assert summary.sessions == 2 and summary.lost_steps == 1
    assert summary.seconds["lost"] == pytest.approx(summary.seconds["step"] / 2)
    assert summary.seconds["checkpoint"] == 1.0 and summary.seconds["down"] > 50
    assert sum(summary.fractions.values()) == pytest.approx(1)


def test_the_time_until_a_run_that_was_stopped_goes_on_is_not_counted(tmp_path, monkeypatch):
    """As the loop leaves it: the end of the session writes once more."""
    clock = [1000.0]
    monkeypatch.setattr("shardlm.metrics.goodput.time.time", lambda: clock[0])
    with Goodput(tmp_path, step=0, started=990.0) as first:
        first.stop()
        clock[0] += 30.0  # a tracker is waited for
    with Goodput(tmp_path, step=0, started=9000.0):
        pass
    assert summarise(read(tmp_path / "goodput.jsonl")).seconds["down"] == 0.0


def test_measuring_refuses_what_would_count_twice_or_nowhere(tmp_path):
    with Goodput(tmp_path, step=0, started=0.0) as goodput:
        twice = pytest.raises(ValueError, match=r"measure\('data'\) inside measure\('step'\)")
        with twice, goodput.measure("step"), goodput.measure("data"):
            pass
        with pytest.raises(ValueError, match="'eval' is not one of step, compile"):
            goodput.add("eval", 1.0)
        assert goodput.summary().sessions == 1
        goodput.stop()
    assert summarise(read(tmp_path / "goodput.jsonl")).seconds["down"] == 0.0


def test_the_other_processes_write_nothing(tmp_path):
    with Goodput(tmp_path, step=0, started=0.0, enabled=False) as goodput:
        with goodput.measure("step"):
            pass
        goodput.step_done(1)
        goodput.stop()
    assert not list(tmp_path.iterdir())
