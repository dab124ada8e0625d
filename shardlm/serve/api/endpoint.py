"""HTTP around a handler that knows none: the body is read and parsed, the answer written as JSON or as events, and the
work ends when the client has gone, takes nothing any more, or has used up its time."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shardlm.serve.api.errors import ApiError, as_api_error, unavailable, unforeseen
from shardlm.serve.api.protocol import parse
from shardlm.serve.api.service import Call, Service

encode = msgspec.json.Encoder().encode
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Gone(Exception):
    """Nobody reads the answer any more."""


class Events:
    """An answer in server-sent events. `chunks` are whole events."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]):
        self.chunks = chunks

    def error(self, error: ApiError) -> bytes:
        """The last bytes, where an error ends the stream."""
        return data(error.body()) + DONE


def data(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
Handler = Callable[[Call, Any], Awaitable[Mapping[str, Any] | Events]]


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class Endpoint:
    """The ASGI application of one path. `handler` takes a parsed `model`."""

    def __init__(self, service: Service, model: type[msgspec.Struct], handler: Handler):
        self.service, self.model, self.handler = service, model, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self.service)
        answer = _Answer(scope, receive, send, self.service.settings.write_seconds, call.id)
        self.service.active += 1
        try:
            await self._answer(call, answer, scope, receive)
        except Gone:
            return
        finally:
            self.service.active -= 1

    async def _answer(self, call: Call, answer: "_Answer", scope: Scope, receive: Receive) -> None:
        """Raises Gone where nobody takes the answer."""
        try:
            async with asyncio.timeout(self.service.settings.request_seconds), call.stack:
                request = await self._request(scope, receive)
                await _until_gone(receive, self._respond(call, request, answer))
        except Gone:
            raise
        except Exception as error:
            if (known := as_api_error(error)) is None:
                logging.exception("request %s failed", call.id)
            await answer.error(known or unforeseen())

    async def _request(self, scope: Scope, receive: Receive) -> msgspec.Struct:
        settings = self.service.settings
        if self.service.draining:
            raise unavailable("this server takes no new requests, since it is about to end")
        try:
            async with asyncio.timeout(settings.read_seconds):
                body = await _body(scope, receive, settings.max_body)
        except TimeoutError:
            message = f"the body had not come after {settings.read_seconds:g} seconds"
            raise ApiError(message, 408, code="timeout") from None
        request, ignored = parse(body, self.model)
        self.service.metrics.ignored_fields += ignored
        self.service.check_model(request.model)
        return request

    async def _respond(self, call: Call, request: msgspec.Struct, answer: "_Answer") -> None:
        result = await self.handler(call, request)
        if isinstance(result, Events):
            await answer.stream(result)
        else:
            await answer.whole(json_response(result))


class _Answer:
    """Writes one response, and gives up a client that takes nothing for `seconds`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, seconds: float, id: str):
        self._scope, self._receive, self._plain_send, self._seconds, self._id = scope, receive, send, seconds, id
        self._events: Events | None = None  # once its first bytes are sent

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"].append((b"x-request-id", self._id.encode()))
        try:
            async with asyncio.timeout(self._seconds):
                await self._plain_send(message)
        except (TimeoutError, OSError):
            raise Gone from None

    async def whole(self, response: Response) -> None:
        await response(self._scope, self._receive, self._send)

    async def stream(self, events: Events) -> None:
        async with contextlib.aclosing(events.chunks) as chunks:
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS]})
            self._events = events
            async for chunk in chunks:
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def error(self, error: ApiError) -> None:
        """As a status, or where one was sent already as the last event."""
        if self._events is None:
            await self.whole(error_response(error))
        else:
            last = self._events.error(error)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _body(scope: Scope, receive: Receive, most: int) -> bytes:
    """Raises ApiError for a body over the limit, Gone where the client goes first."""
    told = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    length, parts = 0, []
    too_long = told.isdigit() and int(told) > most
    while not too_long:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        too_long = length > most
        if not message.get("more_body"):
            break
    if too_long:
        raise ApiError(f"the body is above {most} bytes; send less at once", 413, code="request_too_large")
    return b"".join(parts)


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Awaits `work`, or cancels it when the client disconnects and raises Gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def events_of(values: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:
    """Each value as an event, and the end."""
    async for value in values:
        yield data(value)
    yield DONE
