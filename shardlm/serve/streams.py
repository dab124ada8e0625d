"""From the engine's thread to the coroutines that wait for it."""

import asyncio
import dataclasses
from collections.abc import Callable

from shardlm.serve.outputs import RequestOutput


@dataclasses.dataclass(frozen=True)
class Command:
    """What the engine's thread is to run, and who waits for it."""

    run: Callable[[], None]
    stream: "Stream | None"


class Stream:
    """Outputs of one request from the engine's thread to its coroutine; what was not read yet is replaced. None:
    what was asked for is done."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop, self._new = loop, asyncio.Event()
        self._latest: RequestOutput | Exception | None = None

    def put(self, item: RequestOutput | Exception | None) -> bool:
        """From the engine's thread. Whether anybody can read it: an event loop may be closed at any time."""
        self._latest = item
        try:
            self._loop.call_soon_threadsafe(self._new.set)
        except RuntimeError:
            return False
        return True

    async def next(self) -> RequestOutput | None:
        """The newest output. Raises what came instead of one."""
        await self._new.wait()
        self._new.clear()
        if isinstance(self._latest, Exception):
            raise self._latest
        return self._latest
