"""HTTP around a handler that knows none: the body is read and parsed, the answer written as JSON or as events, and the
work ends when the client has gone, takes nothing any more, or has used up its time."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardlm.serve.adapter_table import LoRARequest
from shardlm.serve.api import anthropic_errors
from shardlm.serve.api.errors import ApiError, as_api_error, unforeseen
from shardlm.serve.api.http import (
    NAMED_PING,
    PING,
    Gone,
    encode,
    error_response,
    json_response,
    read_body,
    send_within,
    until_gone,
)
from shardlm.serve.api.ollama import errors as ollama_errors
from shardlm.serve.api.protocol import parse
from shardlm.serve.api.service import Call, Service

_STREAM = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_EVENTS = b"text/event-stream; charset=utf-8"


_NAME = re.compile(rb"[\x21-\x7e]{1,128}")
PING_SECONDS = 15.0  # between signs of life: proxies end an answer of which nothing comes for 60 seconds (nginx)


class Events:
    """An answer in server-sent events, or below Ollama's paths in lines of JSON. `chunks` are whole ones."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]):
        self.chunks = chunks

    def error(self, error: ApiError) -> bytes | None:
        """The last bytes, where an error ends them; None: as those of any answer of the path."""


def data(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def named(event: Mapping[str, Any]) -> bytes:
    """An event that its type names, as those of responses and messages are."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))


DONE = b"data: [DONE]\n\n"


def last_words(path: str, error: ApiError, id: str) -> bytes:
    """What ends the stream of the request `id` where an error does, in the form of this path's events."""
    if path.startswith(anthropic_errors.MESSAGES):
        return named(anthropic_errors.body(error, id))
    if ollama_errors.is_ollamas(path):
        return encode(ollama_errors.body(error)) + b"\n"
    if path.startswith("/v1/responses"):
        return named({"type": "error", **about(error)})
    return data(error.body()) + DONE


def _ping(path: str) -> bytes:
    """The sign of life of this path's streams."""
    if ollama_errors.is_ollamas(path):
        return ollama_errors.PING
    return NAMED_PING if path.startswith(anthropic_errors.MESSAGES) else PING  # named by type as its events are


def about(error: ApiError) -> dict[str, Any]:
    """As events of responses tell it."""
    return {"code": error.code or error.type, "message": error.message, "param": error.param}


Handler = Callable[[Call, Any], Awaitable[Mapping[str, Any] | Events]]


def name_of(scope: Scope, own: str) -> str:
    """What a request is called in the header of its answer and in the log: as its client or a proxy calls it, in
    X-Request-Id, where that is a word, so that their logs and this one's can be put together; else `own`."""
    given = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if _NAME.fullmatch(given) else own


class Endpoint:
    """The ASGI application of one path. `handler` takes a parsed `model`. `loads`: it counts among what loads the
    server (Service.load)."""

    def __init__(self, service: Service, model: type[msgspec.Struct], handler: Handler, *, loads: bool = True):
        self.service, self.model, self.handler, self.loads = service, model, handler, loads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self.service)
        answer = _Answer(scope, receive, send, self.service.settings.write_seconds, call.id)
        self.service.active += 1
        self.service.load += self.loads
        try:
            await self._answer(call, answer, scope, receive)
        except Gone:
            return
        finally:
            self.service.active -= 1
            self.service.load -= self.loads

    async def _answer(self, call: Call, answer: "_Answer", scope: Scope, receive: Receive) -> None:
        """Raises Gone where nobody takes the answer."""
        try:
            async with asyncio.timeout(self.service.settings.request_seconds), call.stack:
                request = await self._request(scope, receive)
                call.adapter = self.adapter_of(request)
                await until_gone(receive, self._respond(call, request, answer))
        except Gone:
            raise
        except Exception as error:
            if (known := as_api_error(error)) is None:
                logging.exception("request %s failed", name_of(scope, call.id))
            await answer.error(known or unforeseen())

    async def _request(self, scope: Scope, receive: Receive) -> msgspec.Struct:
        settings = self.service.settings
        self.service.check_open()
        body = await read_body(scope, receive, settings.max_body, settings.read_seconds)
        request, ignored = self.parse(body)
        self.service.metrics.ignored_fields += ignored
        return request

    def parse(self, body: bytes) -> tuple[msgspec.Struct, int]:
        """As protocol.parse."""
        return parse(body, self.model)

    def adapter_of(self, request: msgspec.Struct) -> LoRARequest | None:
        """As Service.adapter_of, of what the request calls the model."""
        return self.service.adapter_of(request.model)

    async def _respond(self, call: Call, request: msgspec.Struct, answer: "_Answer") -> None:
        async with answer.pings() if getattr(request, "stream", False) else contextlib.nullcontext():
            result = await self.handler(call, request)
            if isinstance(result, Events):
                await answer.stream(result)
        if not isinstance(result, Events):
            await answer.whole(json_response(result))


class _Answer:
    """Writes one response, and gives up a client that takes nothing for `seconds`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, seconds: float, id: str):
        self._scope, self._receive, self._plain_send, self._seconds, self._id = scope, receive, send, seconds, id
        self._events: Events | None = None
        self._sent = 0  # messages
        self._ids = [(b"x-request-id", name_of(scope, id).encode())]
        if anthropic_errors.is_anthropics(scope):
            self._ids.append((b"request-id", anthropic_errors.request_id(id).encode()))

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] += self._ids
        self._sent += 1
        try:
            await send_within(self._seconds, self._plain_send, message)
        except asyncio.CancelledError:
            self._sent -= 1  # it waits for the client before it is written
            raise

    async def whole(self, response: Response) -> None:
        await response(self._scope, self._receive, self._send)

    async def stream(self, events: Events) -> None:
        self._events = events
        async with contextlib.aclosing(events.chunks) as chunks:
            await self._begin()
            async for chunk in chunks:
                await self._more(chunk)
        await self._more(b"", last=True)

    async def _begin(self) -> None:
        if not self._sent:
            kind = ollama_errors.NDJSON if ollama_errors.is_ollamas(self._scope["path"]) else _EVENTS
            headers = [(b"content-type", kind), *_STREAM]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _more(self, body: bytes, last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    @contextlib.asynccontextmanager
    async def pings(self) -> AsyncIterator[None]:
        """Inside it a ping is sent whenever nothing was for `PING_SECONDS`: a request may wait for others, or read a
        long prompt. It begins the answer, and what is wrong is told by an event from there on."""

        async def send_them() -> None:
            ping, before = _ping(self._scope["path"]), -1
            with contextlib.suppress(Gone):  # of which the next event tells
                while True:
                    if self._sent == before:
                        await self._begin()
                        await self._more(ping)
                    before = self._sent
                    await asyncio.sleep(PING_SECONDS)

        task = asyncio.create_task(send_them())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def error(self, error: ApiError) -> None:
        """As a status, or where one was sent already as the last event."""
        if not self._sent:
            await self.whole(error_response(error, self._scope, self._id))
            return
        own = self._events and self._events.error(error)
        await self._more(own or last_words(self._scope["path"], error, self._id), last=True)


async def events_of(values: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:
    """Each value as an event, and the end."""
    async for value in values:
        yield data(value)
    yield DONE
