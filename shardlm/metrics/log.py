"""The metrics of a run, step by step, in two forms: RUN/metrics.jsonl, which is the record, and the same
numbers as TensorBoard events under RUN/tensorboard. Which metrics there are, and when, is up to the
training loop.
"""

import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from shardlm.files import cannot_write
from shardlm.metrics.jsonl import JsonLines
from shardlm.metrics.trackers import Tracker, end_all

log = logging.getLogger(__name__)

TRAIN_LOSS, VALIDATION_LOSS = "loss", "validation_loss"  # the two names that other modules look for
BY_SOURCE = f"{VALIDATION_LOSS}/"  # and the source's name: of one of several
FILE_NAME = "metrics.jsonl"
FLUSH_SECONDS = 10.0
AGAIN_SECONDS = 60.0  # until a disk that took no events is tried again


class MetricsLog:
    """Writes metrics to both forms; a context manager. A run that resumes replaces what it does again.

    The JSONL lines reach the operating system one by one; the events follow every few seconds.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        resume_step: int = 0,
        enabled: bool = True,
        trackers: Callable[[], Sequence[Tracker]] = tuple,
    ):
        """Opens the logs of `run_dir` to continue after `resume_step` steps: later lines are dropped, all of
        them where it is 0. One process of a run is `enabled`; for the others each method does nothing. `trackers`, made
        once the logs are open, get what TensorBoard does.

        Raises:
            ShardlmError: a log is damaged or cannot be written.
        """
        self._enabled = enabled
        if not enabled:
            return
        run_dir = pathlib.Path(run_dir)
        self._lines = JsonLines(run_dir / FILE_NAME, lambda line: 0 < resume_step >= line.get("step", 0))
        self._events = _Events(run_dir / "tensorboard", resume_step)
        self._trackers = trackers()

    def write(self, step: int, metrics: Mapping[str, float | np.ndarray]) -> None:
        """Records `metrics` after `step` steps; "step" and "time" (seconds since 1970) are no names for one. An array
        goes to the JSONL as lists and to TensorBoard not at all.

        Raises:
            ShardlmError: the disk is full, and has been for long (jsonl.py).
        """
        if not self._enabled:
            return
        now, values = time.time(), {name: np.asarray(value, float).tolist() for name, value in metrics.items()}
        self._lines.append({"step": step, "time": now} | values)
        numbers = {name: value for name, value in values.items() if isinstance(value, float)}
        for tracker in self._trackers:
            tracker.write(step, numbers)
        self._events.write(step, now, numbers)

    def close(self, failed: bool = False) -> None:
        """`failed`: the run ended in an error."""
        if self._enabled:
            try:
                end_all(self._trackers, failed)
            finally:  # also where nobody waits for a tracker any more (Ctrl-C)
                self._events.close()
                self._lines.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error) -> None:
        self.close(failed=error[0] is not None)


class _Events:
    """TensorBoard event files, written in the calling thread: tensorboardX's SummaryWriter leaves them to a thread that
    dies on a full disk, after which a later event waits for ever. Where the disk takes none any more, what comes until
    it does is left out, with a warning: the other form is the record. Then a new file begins, since the old one may end
    within an event."""

    def __init__(self, directory: pathlib.Path, resume_step: int):
        self._directory, self._writer, self._told = directory, None, False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # A START event tells TensorBoard to forget what earlier files hold from this step on.
            first = resume_step + 1 if resume_step else 0
            start = Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START))
            self._write(start)
        except OSError as error:
            raise cannot_write(directory, error) from error

    def write(self, step: int, now: float, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        if self._writer is None and time.monotonic() - self._flushed < AGAIN_SECONDS:
            return
        try:
            self._write(Event(wall_time=now, step=step, summary=summary))
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._writer.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._lose(error)

    def _write(self, event: Event) -> None:
        if self._writer is None:
            # The suffix keeps two starts within one second apart.
            self._writer = EventsWriter(str(self._directory / "events"), f".{os.getpid()}.{time.monotonic_ns()}")
            self._flushed = time.monotonic()
        self._writer.write_event(event)

    def _lose(self, error: OSError) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer, self._flushed = None, time.monotonic()
        if not self._told:
            self._told = True
            why = error.strerror or error
            log.warning("%s: %s; some events are missing there, and %s has all", self._directory, why, FILE_NAME)

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._lose(error)
