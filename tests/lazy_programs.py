"""Engines whose programs are compiled when they are first called, for tests that call few of those that an engine
compiles before its first request. What it compiles then, and that no request compiles anything, is tested under
`all_compiled()`, where engines are as users have them."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest

from shardlm.serve.compiling import compile_all
from shardlm.serve.runner import Runner


class Programs(dict):
    """Of one runner: key -> program."""

    def __init__(self, runner: Runner):
        self.runner, self.lock = runner, threading.Lock()
        self.work = {
            key: (run, jax.tree.map(shape_of, arguments)) for key, (run, arguments) in runner._shapes().items()
        }

    def __missing__(self, key: Any) -> Callable:
        with self.lock:
            if key not in self:
                started = time.perf_counter()
                self[key] = self.runner.lower(key, *self.work[key]).compile()
                self.runner.compile_seconds += time.perf_counter() - started
            return self[key]


def shape_of(argument: Any) -> Any:
    """Weights may have been given away by the time a program is made for them."""
    if isinstance(argument, jax.Array):
        return jax.ShapeDtypeStruct(argument.shape, argument.dtype, sharding=argument.sharding)
    return argument


def compile_when_called(runners: Sequence[Runner], progress: Callable[[int, int], None]) -> None:
    """In place of compile_all."""
    for runner in runners:
        runner._programs = Programs(runner)
        runner.allocate()


@contextlib.contextmanager
def compiling_by(compile: Callable) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in ("runner", "build"):
            patch.setattr(f"shardlm.serve.{module}.compile_all", compile)
        yield


def all_compiled() -> contextlib.AbstractContextManager[None]:
    """Engines that are made within compile all their programs first."""
    return compiling_by(compile_all)
