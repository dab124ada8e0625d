"""A line for texts that take a tokenizer long, tens of seconds for 30 MB: one at a time, so that the threads which all
other requests wait for stay free. No jax."""

import asyncio
import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

LONG = 2**18  # characters or tokens: 0.5 s of a core


class LongTexts:
    """One thread, which starts with the first text."""

    def __init__(self):
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "long-texts")

    async def run(self, size: int, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`work` beside the event loop; of a text longer than LONG, in its turn. Who gives up leaves the line."""
        if size <= LONG:
            return await asyncio.to_thread(work, *args, **options)
        call = functools.partial(work, *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
