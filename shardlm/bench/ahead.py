"""Compiles the programs of many cases ahead, several at a time. On a GPU nearly all time of a case went to that: XLA
tries kernels out, a core for each program. Eleven training steps of about 9 s each were compiled side by side in 35 s
(16 cores, H200, measured). Nothing is timed meanwhile, as what is tried out runs on the GPU too."""

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Lowering = Callable[[], Callable[[], Any]]
"""Traces a program, and returns what compiles it."""


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
    """All of them, as many at a time as there are cores. Traced one after the other, as Python does one at a time, and
    compiled as they come: those that are traced last do not keep the first ones waiting."""
    made, compiling = {}, {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        try:
            for key, lower in lowerings.items():
                try:
                    compiling[key] = pool.submit(_timed, lower())
                except Exception as error:  # of its own case: the others go on
                    made[key] = Made(error=error)
            return made | {key: future.result() for key, future in compiling.items()}
        except BaseException:  # Ctrl-C: those that have not begun would be minutes to wait for
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _timed(finish: Callable[[], Any]) -> Made:
    started = time.perf_counter()
    try:
        return Made(finish(), time.perf_counter() - started)
    except Exception as error:
        return Made(error=error, seconds=time.perf_counter() - started)
