"""Compiles the programs of many cases ahead, several at a time. On a GPU nearly all time of a case went to that: XLA
tries kernels out, a core for each program. Eleven training steps of about 9 s each were compiled side by side in 35 s
(16 cores, H200, measured). Nothing is timed meanwhile, as what is tried out runs on the GPU too."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from shardlm.compiled_together import Key, Lowering, compiled_together


@dataclasses.dataclass(frozen=True)
class Made:
    """What became of a program: itself and the seconds that compiling took, beside others; or the `error`."""

    program: Any = None
    seconds: float = 0.0
    error: Exception | None = None

    def get(self) -> Any:
        """Raises what tracing or compiling raised."""
        if self.error is not None:
            raise self.error
        return self.program


def compile_all(lowerings: Mapping[Key, Lowering]) -> dict[Key, Made]:
    """All of them; what fails is an error of its own case, and the others go on."""
    found = compiled_together((key, functools.partial(_lowered, lower)) for key, lower in lowerings.items())
    return {key: future.result() for key, future in found}


def _lowered(lower: Lowering) -> Callable[[], Made]:
    try:
        return functools.partial(_timed, lower())
    except Exception as error:
        return functools.partial(Made, error=error)


def _timed(finish: Callable[[], Any]) -> Made:
    started = time.perf_counter()
    try:
        return Made(finish(), time.perf_counter() - started)
    except Exception as error:
        return Made(error=error, seconds=time.perf_counter() - started)
