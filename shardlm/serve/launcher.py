"""Starts programs in turn, on a thread where their start takes as long as they do.

A program with a conditional, or a loop whose trips are known on the device alone, needs the host at each: XLA on a GPU
waits there until the device is done and reads the predicate (xla/backends/gpu/runtime/while_thunk.cc), in the thread
that started the program, which jax's client for GPUs lets go only when all kernels have been given to the device.
Started on the engine's thread, replicas would take turns, pipeline stages too, and the host would be ahead of nothing.
"""

import concurrent.futures
import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

SWITCH_SECONDS = 0.0005  # after which Python lets another thread run


class Later(Protocol):
    """What a program gives, once it has been started."""

    def done(self) -> bool: ...

    def result(self) -> Any:
        """Waits for the start, not for the program. Raises what went wrong with it, or with one before it."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What `pick` takes from what another gives."""

    of: Later
    pick: Callable[[Any], Any]

    def done(self) -> bool:
        return self.of.done()

    def result(self) -> Any:
        return self.pick(self.of.result())


class Launcher:
    """Calls functions in the order in which they are given, on one thread of its own or (`threaded` False) at once.

    After one has failed, those behind it fail with the same error: what they work on may be gone. `clear` ends that.
    Those that are called `regardless` work on something else.
    """

    def __init__(self, threaded: bool):
        if threaded:  # else the next start may wait 5 ms for a thread that computes in Python, longer than a step
            sys.setswitchinterval(min(SWITCH_SECONDS, sys.getswitchinterval()))
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "launcher") if threaded else None
        self._error: BaseException | None = None

    def submit(self, function: Callable[[], Any], *, regardless: bool = False) -> Later:
        if self._pool:
            return self._pool.submit(self._call, function, regardless)
        made: concurrent.futures.Future = concurrent.futures.Future()
        try:
            made.set_result(self._call(function, regardless))
        except Exception as error:
            made.set_exception(error)
        return made

    def _call(self, function: Callable[[], Any], regardless: bool) -> Any:
        if self._error and not regardless:
            raise self._error
        try:
            return function()
        except BaseException as error:
            self._error = error
            raise

    def clear(self) -> None:
        """Waits for what was given, and forgets an error."""
        if self._pool:
            ended = threading.Event()
            self._pool.submit(ended.set)
            ended.wait()
        self._error = None


def launcher_on(platform: str) -> Launcher:
    """For the devices of a platform."""
    return Launcher(threaded=platform in ("gpu", "cuda"))
