"""Batches of a server: one after the other, in the order in which they came, on half of its places, so that clients who
wait find others. A server that ends leaves them in their folder, and the next one there goes on."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

from starlette.applications import Starlette
from starlette.types import ASGIApp

from shardlm.errors import ShardlmError
from shardlm.serve.api.batches.files import Input, Output
from shardlm.serve.api.batches.lines import Known, Refused, read
from shardlm.serve.api.batches.run import Counts, run
from shardlm.serve.api.batches.store import OPEN, Record, Store
from shardlm.serve.api.errors import unforeseen
from shardlm.serve.api.service import Service
from shardlm.serve.outputs import EngineError

LINES = 50_000  # of a batch, as OpenAI's
TOLD = 100  # of what is wrong with a file


class Closed(Exception):
    """The server is about to end."""


class Batches:
    """`store` has what clients are told; `handlers`: of each endpoint; they run while `running`."""

    def __init__(self, service: Service, handlers: Mapping[str, ASGIApp], folder: str):
        """Raises ShardlmError where the folder cannot be this server's."""
        self.service, self.handlers, self.store = service, handlers, Store(folder)
        self.wake = asyncio.Event()  # another one waits
        self._now: tuple[str, asyncio.Task] | None = None

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette) -> AsyncIterator[None]:
        """The lifespan of the application."""
        task = asyncio.create_task(self._serve())
        task.add_done_callback(_told)
        self.service.leaving.append(task.cancel)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self.store.close()

    def cancel(self, batch: Record) -> None:
        """What was answered of it is kept."""
        self.store.save(batch, "cancelling")
        if self._now and self._now[0] == batch["id"]:
            self._now[1].cancel()
        else:
            self.store.end(batch, "cancelled")

    async def _serve(self) -> None:
        while True:
            batch = next((one for one in self.store.batches.values() if one["status"] in OPEN), None)
            if batch is None:
                self.wake.clear()
                await self.wake.wait()
                continue
            task = asyncio.create_task(self._run(batch))
            self._now = batch["id"], task
            try:
                await asyncio.wait([task])
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                self._now = None
            if not self._ended(batch, task):
                return

    def _ended(self, batch: Record, task: asyncio.Task) -> bool:
        """Whether there is more to do for this server."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, EngineError | Closed):
            return False
        if error:
            known = isinstance(error, ShardlmError)
            if not known:
                logging.error("%s failed", batch["id"], exc_info=error)
            about = {"code": "server_error", "message": str(error) if known else unforeseen().message}
            self.store.end(batch, "failed", [about | {"line": None, "param": None}])
        elif batch["status"] == "cancelling":
            self.store.end(batch, "cancelled")
        return True

    async def _run(self, batch: Record) -> None:
        """To its end, from wherever the last server left it, unless it is to be cancelled."""
        store, path = self.store, str(self.store.content(batch["input_file_id"]))
        handlers = {batch["endpoint"]: self.handlers[batch["endpoint"]]}
        longest = self.service.settings.max_body + 2**16
        if batch["status"] == "validating":
            if errors := await _wrong(batch, Input(path, longest), handlers):
                store.end(batch, "failed", errors)
                return
            store.save(batch, "in_progress")
        if batch["status"] == "in_progress":
            await self._answer(batch, Input(path, longest), handlers)
            store.save(batch, "finalizing")
        if batch["status"] == "finalizing":
            store.end(batch, "completed")

    async def _answer(self, batch: Record, requests: Input, handlers: Mapping[str, ASGIApp]) -> None:
        """The lines that its files do not have."""
        known, counted, outputs = Known(), batch["request_counts"], []
        with contextlib.ExitStack() as stack:
            for name, id in zip(("completed", "failed"), self.store.answers(batch).values(), strict=True):
                outputs.append(Output(str(self.store.content(id)), resume=True, known=known))
                stack.callback(outputs[-1].close)
                counted[name] = outputs[-1].lines

            def write(line: bytes, well: bool) -> None:
                outputs[not well].write(line)
                counted["completed" if well else "failed"] += 1

            most = max(1, self.service.llm.max_num_seqs // 2)
            how = {"most": most, "check": self._check}
            await run(requests.lines(), handlers, write, known, Counts(), **how)

    def _check(self) -> None:
        """Raises EngineError, or Closed."""
        if self.service.draining:
            raise Closed
        self.service.llm.check_health()


def _told(task: asyncio.Task) -> None:
    if not task.cancelled() and (error := task.exception()):
        logging.error("batches wait for the next start", exc_info=error)


async def _wrong(batch: Record, requests: Input, paths: Mapping[str, ASGIApp]) -> list[Record]:
    """What keeps a file from being asked, as OpenAI tells it; counts its lines."""
    known, wrong, total = Known(), [], 0
    async with contextlib.aclosing(requests.lines()) as lines:
        async for number, raw in lines:
            total += 1
            if isinstance(line := known.sort(number, read(number, raw, paths)), Refused):
                wrong.append({"code": line.code, "line": number, "message": line.message, "param": line.param})
            if total > LINES or len(wrong) >= TOLD:
                break
    batch["request_counts"]["total"] = total
    if not total or total > LINES:
        code, what = ("empty_file", "no line") if not total else ("too_many_requests", f"more than {LINES:,} lines")
        wrong.append({"code": code, "line": None, "message": f"the file has {what}", "param": None})
    return wrong
