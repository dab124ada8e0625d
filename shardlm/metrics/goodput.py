"""Goodput: the share of a run's wall-clock time that went into steps which counted, across restarts.
`Goodput` keeps the events in RUN/goodput.jsonl; `summarise` is a pure function from them to the shares.

A run is a row of sessions, one for each start of the command. The wall time is that of the sessions and of
the gaps between them, except a gap after a session that its user ended. Each second is in one category:

- ``step``: training steps that the run still stands on. This is the goodput.
- ``lost``: steps that a later session did again, because it resumed from a checkpoint before them.
- ``init`` (start of the process to start of training), ``compile``, ``data`` (the devices waited for a
  batch), ``sampling`` (they sampled the replies of the next one), ``checkpoint`` (training stood still for
  one), ``evaluation``: as the loop measured them.
- ``down``: from the last sign of life of a session to the next start.
- ``other``: time in a session that nobody measured.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from shardlm.metrics.jsonl import JsonLines, read
from shardlm.metrics.progress import format_duration

FILE_NAME = "goodput.jsonl"
MEASURED = ("step", "compile", "init", "data", "sampling", "checkpoint", "evaluation")
CATEGORIES = (*MEASURED, "lost", "down", "other")
FLUSH_SECONDS = 5.0  # what a killed process loses at most, to ``down``


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the time of a run went: `seconds` has every category, `lost_steps` counts steps done in vain."""

    seconds: dict[str, float]
    sessions: int
    lost_steps: int

    @property
    def wall_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def fractions(self) -> dict[str, float]:
        """The share of each category; they sum to 1."""
        wall = self.wall_seconds
        return {name: spent / wall if wall else float(name == "other") for name, spent in self.seconds.items()}

    @property
    def goodput(self) -> float:
        return self.fractions["step"]

    def __str__(self) -> str:
        shares = sorted(self.fractions.items(), key=lambda share: -share[1])
        rest = ", ".join(f"{name} {share:.1%}" for name, share in shares if name != "step" and share >= 5e-4)
        starts = f", {self.sessions} starts, {self.lost_steps} steps repeated" if self.sessions > 1 else ""
        return f"goodput {self.goodput:.1%} of {format_duration(self.wall_seconds)}{starts} ({rest})"


class Watch(Protocol):
    """Who is told what a run is doing (train/stuck.py)."""

    def begin(self, step: int, part: str) -> None: ...
    def done(self) -> None: ...
    def close(self) -> None: ...


class Goodput:
    """Records where one session spends its time; a context manager. One process of a run does this."""

    def __init__(
        self,
        run_dir: str | os.PathLike,
        step: int,
        started: float,
        enabled: bool = True,
        watch: Watch | None = None,
    ):
        """Begins a session that continues after `step` steps. `started` is when its process began, in seconds
        since 1970 (psutil knows it): the time from there to here becomes ``init``. `watch` is told of each block that
        is measured, and closed with the session.

        Raises:
            ShardlmError: the file is damaged or cannot be written.
        """
        self._enabled, self._step, self._watch = enabled, step, watch
        self._seconds: dict[str, float] = {}
        self._measuring: str | None = None
        self._flushed = time.monotonic()
        self._path = pathlib.Path(run_dir) / FILE_NAME
        if enabled:
            self._lines = JsonLines(self._path)
            self._lines.append({"event": "start", "time": started, "step": step})
            self.add("init", max(0.0, time.time() - started))
            self.flush()

    @contextlib.contextmanager
    def measure(self, category: str) -> Iterator[None]:
        """Counts the time of the block as `category`. Blocks do not nest: a second would be counted twice."""
        if self._measuring:
            raise ValueError(f"measure({category!r}) inside measure({self._measuring!r})")
        self._measuring, begun = category, time.monotonic()
        if self._watch:
            self._watch.begin(self._step, category)
        try:
            yield
        finally:
            if self._watch:
                self._watch.done()
            self._measuring = None
            self.add(category, time.monotonic() - begun)

    def add(self, category: str, seconds: float) -> None:
        """Counts `seconds` as `category`, one of `MEASURED`."""
        if category not in MEASURED:
            raise ValueError(f"{category!r} is not one of {', '.join(MEASURED)}")
        self._seconds[category] = self._seconds.get(category, 0.0) + seconds

    def step_done(self, step: int) -> None:
        """Says that `step` steps are done; writes to disk every `FLUSH_SECONDS`."""
        self._step = step
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what has been counted since the last time."""
        if self._enabled:
            seconds = {name: round(spent, 6) for name, spent in self._seconds.items()}
            self._lines.append({"event": "spent", "time": time.time(), "step": self._step, "seconds": seconds})
        self._seconds, self._flushed = {}, time.monotonic()

    def stop(self) -> None:
        """Says that the session ends on purpose (finished, or stopped by its user, and not by a scheduler that takes
        the machine away): the time until somebody starts the run again is not counted."""
        self.flush()
        if self._enabled:
            self._lines.append({"event": "stop", "time": time.time(), "step": self._step})

    def summary(self) -> Summary:
        """The summary of the run so far, this session included."""
        self.flush()
        return summarise(read(self._path))

    def __enter__(self) -> "Goodput":
        return self

    def __exit__(self, *_) -> None:
        if self._watch:
            self._watch.close()
        if self._enabled:
            self.flush()
            self._lines.close()


def summarise(events: Sequence[dict[str, Any]]) -> Summary:
    """Where the time went, from the events of RUN/goodput.jsonl in the order they were written."""
    sessions = _split(events)
    total = dict.fromkeys(CATEGORIES, 0.0)
    lost_steps = 0
    for index, session in enumerate(sessions):
        # The earliest step that a later session resumed from: what this session did after it was done again.
        kept = min((later[0]["step"] for later in sessions[index + 1 :]), default=None)
        seconds, lost = _session(session, kept)
        total = {name: total[name] + seconds.get(name, 0.0) for name in total}
        lost_steps += lost
    for session, following in itertools.pairwise(sessions):
        if all(event["event"] != "stop" for event in session):  # what is spent on leaving comes after it
            total["down"] += max(0.0, following[0]["time"] - session[-1]["time"])
    return Summary(total, len(sessions), lost_steps)


def _session(events: Sequence[dict[str, Any]], kept: int | None) -> tuple[dict[str, float], int]:
    """Seconds by category of one session, and how many of its steps are lost because only `kept` stand."""
    seconds = collections.Counter()
    lost_steps = 0
    for before, event in itertools.pairwise(events):
        spent = event.get("seconds", {})
        seconds.update(spent)
        lost, share = _lost(before["step"], event["step"], kept)
        seconds.update({"lost": share * spent.get("step", 0.0), "step": -share * spent.get("step", 0.0)})
        lost_steps += lost
    seconds["other"] = max(0.0, events[-1]["time"] - events[0]["time"] - sum(seconds.values()))
    return seconds, lost_steps


def _split(events: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    return [list(events[a:b]) for a, b in itertools.pairwise([*starts, len(events)])]


def _lost(first: int, last: int, kept: int | None) -> tuple[int, float]:
    """How many of the steps `first` + 1 ... `last` come after `kept`, and their share of them."""
    if kept is None or last <= kept or last <= first:
        return 0, 0.0
    lost = last - max(first, kept)
    return lost, lost / (last - first)
