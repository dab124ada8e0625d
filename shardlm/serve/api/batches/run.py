"""From lines to answers: each is asked of the server's own handler in this process, as many at once as there is use
for, and written when it ends, in whatever order they end: nothing waits in memory for an earlier line, and a process
that is killed loses what was under way and no more. OpenAI's output is in no order either; vLLM's is in the input's."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping

from starlette.types import ASGIApp, Message

from shardlm.errors import ShardlmError
from shardlm.serve.api.batches.files import Numbered
from shardlm.serve.api.batches.lines import Answer, Known, Line, Refused, read

AGAIN_SECONDS = 1.0  # until a line is asked again for which other clients left no room (429)


@dataclasses.dataclass
class Counts:
    """Of lines: answered with status 200, or otherwise or not at all; in the output from before; under way."""

    done: int = 0
    failed: int = 0
    before: int = 0
    running: int = 0


async def ask(app: ASGIApp, path: str, body: bytes) -> Answer:
    """What an application says to one request that nobody breaks off."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, said = 0, {}, []

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        return parts.pop()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            said.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    await app(scope, receive, send)
    return Answer(status, headers.get(b"x-request-id", b"").decode(), b"".join(said))


async def run(
    lines: AsyncGenerator[Numbered, None],
    handlers: Mapping[str, ASGIApp],
    write: Callable[[bytes, bool], None],
    known: Known,
    counts: Counts,
    *,
    most: int,
    check: Callable[[], None],
) -> None:
    """Answers all lines that `known` does not have. `handlers`: of each url. `write`: takes the line of an answer, and
    whether that is one of status 200. `most`: lines under way at once. `check`: raises where the engine has ended, and
    what is under way is not answered.

    Raises: what `lines`, `write` and `check` do, the first when what was under way has been written.
    """
    slots, unread = asyncio.Semaphore(most), None

    async def one(line: Line) -> None:
        try:
            answer = await _answered(line, handlers[line.path], check)
            write(answer.record(line.custom_id), answer.status == 200)
            counts.done, counts.failed = counts.done + (answer.status == 200), counts.failed + (answer.status != 200)
        finally:
            counts.running -= 1
            slots.release()

    try:
        async with contextlib.aclosing(lines), asyncio.TaskGroup() as group:
            try:
                async for number, raw in lines:
                    line = known.sort(number, read(number, raw, handlers))
                    if line is None:
                        counts.before += 1
                    elif isinstance(line, Refused):
                        write(line.record(), False)
                        counts.failed += 1
                    else:
                        await slots.acquire()
                        counts.running += 1
                        group.create_task(one(line))
            except ShardlmError as error:
                unread = error
    except ExceptionGroup as errors:  # the first ended the others
        raise errors.exceptions[0] from None
    if unread:
        raise unread


async def _answered(line: Line, app: ASGIApp, check: Callable[[], None]) -> Answer:
    """Raises as `check` does."""
    while True:
        answer = await ask(app, line.path, line.body)
        if answer.status >= 500:
            check()
        if answer.status != 429:
            return answer
        await asyncio.sleep(AGAIN_SECONDS)
