"""Ends a run in which nothing goes on any more: a process that hangs in its file system, or a collective that some
device never enters, for which the others would wait for ever (https://github.com/jax-ml/jax/issues/38503). A process
that dies is noticed by distributed.py."""

import collections
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardlm import distributed, life
from shardlm.metrics.progress import format_duration

KEY = "shardlm/stuck/"  # of jax's coordinator: what each process says that finds itself stuck
WAIT = 30.0  # seconds that one gives the others to find it too
# What a run's parts are called that may not take so long (metrics/goodput.py); compiling may.
WATCHED = {
    "step": "in a step of the devices",
    "data": "reading rows",
    "sampling": "sampling replies",
    "evaluation": "in a validation",
    "checkpoint": "saving a checkpoint",
}


class Patience:
    """Watches the parts of a run, one after the other; where one takes longer than `seconds` without a sign of life
    (life.py), says what every process was doing and where each thread of this one stands, and ends the process with
    status 1. Time in which the process itself stood still, as where a scheduler suspends jobs, does not count.

    end    ends it; a test gives its own
    wait   how long to wait for what other processes say
    """

    def __init__(self, seconds: float, end: Callable[[int], Any] = os._exit, wait: float = WAIT):
        self.seconds, self._end, self._wait = seconds, end, wait
        self._now: tuple[int, str, float] | None = None  # step, part, since when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
        self._thread.start()

    def begin(self, step: int, part: str) -> None:
        """A part of the run begins, after so many steps."""
        self._now = (step, part, time.monotonic()) if part in WATCHED else None

    def done(self) -> None:
        """It is over; what comes until the next one is not watched."""
        self._now = None

    def close(self) -> None:
        self._over.set()
        self._thread.join(1.0)  # no longer: it may be asking a process that does not answer

    def _watch(self) -> None:
        tick, before = min(self.seconds / 10, 10.0), time.monotonic()
        while not self._over.wait(tick):
            before, slept = time.monotonic(), time.monotonic() - before
            if slept > 2 * tick + 1:
                life.alive()
            now = self._now  # the other thread replaces it as a whole
            if now and self._quiet(now, before) > self.seconds:
                own = {"step": now[0], "part": now[1], "seconds": self._quiet(now, before)}
                said = _within(2.5 * self._wait, lambda own=own: _of_all(own, self._wait))
                still = self._now is now and self._quiet(now, time.monotonic()) > self.seconds
                if still:  # the run may have gone on while the others were asked
                    _within(self._wait, lambda own=own, said=said: self._tell(said or {jax.process_index(): own}))
                    self._end(1)
                    return
                _within(self._wait, _taken_back)
                before = time.monotonic()

    def _quiet(self, now: tuple[int, str, float], at: float) -> float:
        """Seconds from when the part began, or from the last sign of life, until this time."""
        return at - max(now[2], life.last())

    def _tell(self, said: Mapping[int, Mapping[str, Any]]) -> None:
        with contextlib.suppress(Exception):  # where stderr is no file, as in notebooks
            faulthandler.dump_traceback(all_threads=True)
        print(f"error: {describe(said, jax.process_count(), self.seconds)}", file=sys.stderr, flush=True)


def _within(seconds: float, make: Callable[[], Any]) -> Any:
    """What `make` gives, or None where it fails or takes longer: what a run hangs in may be what the others are asked
    by, or what its output goes to."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(make())

    thread = threading.Thread(target=run, name="last words", daemon=True)
    thread.start()
    thread.join(seconds)
    return next(iter(found), None)


def _taken_back() -> None:
    """This process goes on after all."""
    if jax.process_count() > 1:
        distributed.coordinator().key_value_delete(f"{KEY}{jax.process_index()}")


def _of_all(own: Mapping[str, Any], wait: float) -> dict[int, dict[str, Any]]:
    """What the processes of the job say that find themselves stuck, by their number."""
    here = jax.process_index()
    if jax.process_count() == 1:
        return {here: dict(own)}
    client, said = distributed.coordinator(), {here: dict(own)}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # without a coordinator each knows of itself
        client.key_value_set(f"{KEY}{here}", json.dumps(own), allow_overwrite=True)
        time.sleep(wait if here else 1.5 * wait)  # process 0 has the keys, and ends last
        for key, value in client.key_value_dir_get(KEY):
            said[int(key.rpartition("/")[2])] = json.loads(value)
    return said


def describe(said: Mapping[int, Mapping[str, Any]], processes: int, seconds: float) -> str:
    """What each process was doing, those together that did the same, and what to do about it."""
    together: dict[tuple[int, str], list[int]] = collections.defaultdict(list)
    for process, one in sorted(said.items()):
        together[one["step"] + 1, one["part"]].append(process)
    # Who is not in a step keeps the others waiting there; or the few that are in another.
    suspects_first = sorted(together.items(), key=lambda item: (item[0][1] == "step", len(item[1])))
    parts = []
    for (step, part), group in suspects_first:
        longest = format_duration(max(said[process]["seconds"] for process in group))
        parts.append(f"{_numbers(group)} for {longest} {WATCHED[part]}, step {step}")
    if silent := sorted(set(range(processes)) - set(said)):
        parts.append(f"{_numbers(silent)} said nothing")
    limit = f"{format_duration(seconds)} (train.stuck_seconds={seconds:g})"
    return (
        f"nothing went on for more than {limit}: {'; '.join(parts)}. "
        "Where the threads of this process stand is above. The run ends; started again it resumes from its latest "
        "checkpoint. Where parts of a run rightly take longer, raise train.stuck_seconds, or set it to 0"
    )


def _numbers(processes: list[int]) -> str:
    """Of [0, 1, 2, 5]: processes 0-2, 5."""
    runs: list[list[int]] = []
    for number in processes:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"process{'es' if len(processes) > 1 else ''} {words}"
