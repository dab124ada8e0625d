"""What runs on the devices while something is measured, by the profiler."""

import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from shardlm.profile import trace

T = TypeVar("T")


def traced(run: Callable[[], T]) -> tuple[T, list[trace.Event]]:
    """(its result, what ran on the devices). Of the host only jax's own calls are in the trace, and no Python."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            made = run()
        return made, trace.read(jax.profiler.ProfileData.from_file(str(trace.find(pathlib.Path(folder)))))


def busy(events: Sequence[trace.Event]) -> float:
    """Seconds in which any of them ran; on a CPU a loop and what is in it are events both."""
    nanoseconds, end = 0, 0
    for event in events:
        nanoseconds += max(0, event.end - max(event.start, end))
        end = max(end, event.end)
    return nanoseconds / 1e9
