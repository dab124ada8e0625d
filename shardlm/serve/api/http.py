"""What every HTTP process of ours does alike, the server and the router before it: bodies with a limit, clients that go
or take nothing, answers in JSON, and who may call."""

import asyncio
import hmac
import uuid
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import shardlm
from shardlm.serve.api import anthropic_errors
from shardlm.serve.api.errors import ApiError, unavailable, unforeseen
from shardlm.serve.api.ollama import errors as ollama_errors
from shardlm.serve.api.settings import HttpSettings

encode = msgspec.json.Encoder().encode
# Signs of life of a stream that has no event to tell: a comment, which every client passes over
# (https://html.spec.whatwg.org/multipage/server-sent-events.html), and that of Anthropic's API.
PING = b": ping\n\n"
NAMED_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def only_pings(data: bytes) -> bool:
    return bool(data) and not data.replace(NAMED_PING, b"").replace(PING, b"").strip(ollama_errors.PING)


class Gone(Exception):
    """Nobody reads the answer any more."""


class Serving:
    """What a process that listens says of itself, and how it ends: `draining`, nothing new is taken; `active`, requests
    whose answers are not all written."""

    def __init__(self):
        self.draining = False
        self.active = 0

    def check_open(self) -> None:
        """Raises ApiError (503) where the process is about to end."""
        if self.draining:
            raise unavailable("this server takes no new requests, since it is about to end")

    async def drain(self) -> None:
        """Returns when nothing is under way."""
        while self.active:
            await asyncio.sleep(0.05)


def application(
    serving: Serving, routes: Sequence[BaseRoute], settings: HttpSettings, open_paths: Collection[str], **options: Any
) -> Starlette:
    """Keys, CORS and errors in the client's form around `routes`; `app.state.service` is `serving`."""
    middleware = [Middleware(_Bare), Middleware(_Guard, keys=settings.api_keys, open_paths=open_paths)]
    if origins := settings.cors_origins:
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    handlers = {HTTPException: _http_error, ApiError: _api_error, Exception: _unforeseen}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, **options)
    app.state.service = serving
    app.router.redirect_slashes = False
    return app


class _Bare:
    """Paths may end in a slash. A redirect to those without would name a server by an address of its own, which those
    who ask a router or a proxy may not reach."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


class _Guard:
    """Asks for a key, where there are any."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]):
        self._app, self._keys, self._open = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in self._open and not bears(scope, self._keys):
            message = "this server asks for a key it knows: Authorization: Bearer KEY, or x-api-key: KEY"
            await error_response(ApiError(message, 401, code="invalid_api_key"), scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def bears(scope: Scope, keys: Sequence[str]) -> bool:
    """Whether a request has one of the keys, as OpenAI's or Anthropic's clients send them, compared in a time that does
    not tell how much of one is right."""
    headers = dict(scope["headers"])
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    each = [headers.get(b"x-api-key", b""), given if scheme.lower() == b"bearer" else b""]
    known = [hmac.compare_digest(one, key.encode()) for one in each for key in keys]
    return any(known)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such path, or not by this method."""
    message = f"{request.method} {request.url.path:.200}: {error.detail}"
    return error_response(ApiError(message, error.status_code, headers=error.headers), request.scope)


async def _unforeseen(request: Request, error: Exception) -> Response:
    return error_response(unforeseen(), request.scope)


async def version(request: Request) -> Response:
    """As vLLM's /version: of this project."""
    return json_response({"version": shardlm.__version__})


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, headers, "application/json")


def error_response(error: ApiError, scope: Scope, id: str | None = None) -> Response:
    """In the form that who asked reads. `id`: of the request, where it has one that its answer tells anyway."""
    if ollama_errors.is_ollamas(scope["path"]):
        return json_response(ollama_errors.body(error), error.status, error.headers)
    if not anthropic_errors.is_anthropics(scope):
        return json_response(error.body(), error.status, error.headers)
    own = id or uuid.uuid4().hex
    headers = error.headers if id else error.headers | {"request-id": anthropic_errors.request_id(own)}
    return json_response(anthropic_errors.body(error, own), anthropic_errors.status_of(error), headers)


async def read_body(scope: Scope, receive: Receive, most: int, seconds: float) -> bytes:
    """Raises ApiError for a body over `most` bytes, compressed, or later than `seconds`, Gone where the client goes
    first."""
    coding = dict(scope["headers"]).get(b"content-encoding", b"identity").decode("latin-1")
    if coding.lower() not in ("identity", ""):
        raise ApiError(f"content-encoding {coding:.50} is not supported; send the body as it is", 415)
    try:
        async with asyncio.timeout(seconds):
            return await _body(scope, receive, most)
    except TimeoutError:
        raise ApiError(f"the body had not come after {seconds:g} seconds", 408, code="timeout") from None


async def _body(scope: Scope, receive: Receive, most: int) -> bytes:
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


async def send_within(seconds: float, send: Send, message: Message) -> None:
    """Raises Gone where the client takes nothing for so long."""
    try:
        async with asyncio.timeout(seconds):
            await send(message)
    except (TimeoutError, OSError):
        raise Gone from None


async def until_gone(receive: Receive, work: Awaitable[None]) -> None:
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
