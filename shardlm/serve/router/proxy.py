"""One request: to a replica, on to another where it produced nothing, and its answer back as it comes."""

import asyncio
import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from shardlm.serve.api import anthropic_errors
from shardlm.serve.api.endpoint import last_words
from shardlm.serve.api.errors import ApiError, as_api_error, unavailable, unforeseen
from shardlm.serve.api.http import Gone, error_response, read_body, send_within, until_gone
from shardlm.serve.api.ollama import errors as ollama_errors
from shardlm.serve.api.ollama.names import known_as, listed_as
from shardlm.serve.router.fleet import SILENT, Replica
from shardlm.serve.router.prompt import Hints, hints
from shardlm.serve.router.service import Router
from shardlm.serve.router.upstream import Answer, Asked, Broken, Header, Nothing, ask

_MODEL = "/v1/models/"
_FULL = (429, 503, anthropic_errors.OVERLOADED)  # answers of a replica that has done nothing with a request
_MOST_KEPT = 2**16  # bytes of such an answer


class _Error(msgspec.Struct):
    message: str


class _Told(msgspec.Struct):
    """An error in OpenAI's form, Anthropic's or Ollama's."""

    error: _Error | str


class Proxy:
    """The ASGI application of all paths that the replicas answer."""

    def __init__(self, router: Router):
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        router, settings = self._router, self._router.settings
        passage = _Passage(router, send)
        router.active += 1
        try:
            router.check_open()
            body = await read_body(scope, receive, settings.max_body, settings.read_seconds)
            asked = Asked(scope["method"], _target(scope), scope["headers"], body)
            wish = hints(body) if body else Hints(_model_of(scope["path"]))
            if wish.model is not None:
                named = known_as if ollama_errors.is_ollamas(scope["path"]) else listed_as
                known = named(wish.model, router.fleet.models())
                wish = dataclasses.replace(wish, model=known or wish.model)
            await until_gone(receive, passage.run(asked, wish))
        except Gone:
            return
        except Exception as error:
            if (known := as_api_error(error)) is None:
                logging.exception("a request failed")
            known = known or unforeseen()
            if passage.waits and not passage.begun:
                with contextlib.suppress(Gone):
                    await passage.end(_target(scope), known)
            elif not passage.begun:
                response = error_response(known, scope)
                router.metrics.answers["", response.status_code] += 1
                await response(scope, receive, send)
        finally:
            router.active -= 1


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")


def _model_of(path: str) -> str | None:
    return path.removeprefix(_MODEL) if path.startswith(_MODEL) else None


class _Passage:
    """There and back. waits: the client has been sent signs of life, and the status of an answer with them; begun: it
    has been sent something of one."""

    def __init__(self, router: Router, send: Send):
        self._router, self._plain_send = router, send
        self._arrival = time.perf_counter()
        self.waits = self.begun = False
        self._last = b""  # that it was sent of an answer's body

    async def run(self, asked: Asked, wish: Hints) -> None:
        """Raises ApiError where no replica answered, Gone where the client takes nothing."""
        fleet, metrics = self._router.fleet, self._router.metrics
        tried: list[Replica] = []
        kept: tuple[Replica, int, Sequence[Header], bytes] | None = None  # the last answer that says to try later
        problem: ApiError | None = None
        while len(tried) <= self._router.settings.max_retries:
            try:
                replica, choice = fleet.choose(wish, tried)
            except ApiError as error:
                problem = problem or error
                break
            tried.append(replica)
            fleet.policy.sent(wish.blocks, replica.url)
            try:
                with fleet.sending(replica):
                    async with ask(self._router.client, replica, asked, self._wait) as answer:
                        if answer.status not in _FULL:
                            metrics.blocks += len(wish.blocks)
                            metrics.found += choice.match
                            await self._hand_on(answer, replica, asked)
                            return
                        kept = (replica, answer.status, answer.headers, await _little(answer))
                        metrics.retries[replica.url, str(answer.status)] += 1
            except (Nothing, Broken) as error:
                logging.info("replica %s produced nothing: %s", replica.url, error)
                problem = unavailable("a replica was lost before it answered; try again")
                if refused := isinstance(error, Nothing) and error.refused:
                    fleet.failed(replica, str(error), refused=True)
                metrics.retries[replica.url, "refused" if refused else "lost"] += 1
            fleet.wake.set()
        if kept is None or self.waits:
            raise problem or unavailable("the replicas take no requests now; try again later")
        replica, status, headers, body = kept
        await self._start(replica, status, headers, body, more=False)

    async def _wait(self, answer: Answer) -> None:
        if not self.waits:
            self.waits = True
            await self._send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
        await self._send({"type": "http.response.body", "body": answer.first, "more_body": True})

    async def end(self, target: str, error: ApiError) -> None:
        """By an event, where the status can tell nothing any more."""
        last = last_words(target, error, uuid.uuid4().hex)
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(
        self, replica: Replica, status: int, headers: Sequence[Header], first: bytes, *, more: bool
    ) -> None:
        metrics = self._router.metrics
        metrics.answers[replica.url, status] += 1
        metrics.first.observe(time.perf_counter() - self._arrival)
        self.begun = True
        if not self.waits:
            await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await self._send({"type": "http.response.body", "body": first, "more_body": more})

    async def _send(self, message: dict) -> None:
        await send_within(self._router.settings.write_seconds, self._plain_send, message)

    async def _hand_on(self, answer: Answer, replica: Replica, asked: Asked) -> None:
        """As the bytes come. An answer that breaks off ends with an error, where that can be said, or is cut off.
        Raises ApiError for one without success whose status cannot be told any more."""
        if self.waits and answer.status != 200:
            raise _as_error(answer.status, await _little(answer))
        await self._start(replica, answer.status, answer.headers, answer.first, more=True)
        self._last = answer.first
        try:
            await self._pass_on(answer, replica)
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            self._router.metrics.whole.observe(time.perf_counter() - self._arrival)
        except Broken as error:
            logging.warning("replica %s broke off an answer: %s", replica.url, error)
            self._router.metrics.broken[replica.url] += 1
            self._router.fleet.wake.set()
            if not answer.is_between_events(self._last):
                return  # the server closes a connection whose answer has no end
            lost = ApiError("the replica was lost; ask again", 502, type="server_error", code="replica_lost")
            await self.end(asked.target, lost)

    async def _pass_on(self, answer: Answer, replica: Replica) -> None:
        """Raises Broken for an answer that ends before its end, or stops as its replica does."""
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as limit:
                with replica.gives(limit) as giving:
                    async for chunk in answer.rest():
                        giving.at = now()
                        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
                        self._last = chunk
        except TimeoutError:
            raise Broken(f"nothing came of it, nor of any look, for {SILENT:g} seconds") from None


async def _little(answer: Answer) -> bytes:
    """The whole of an answer that is an error. Raises Broken for one that has no end."""
    body = answer.first
    async for chunk in answer.rest():
        body += chunk
        if len(body) > _MOST_KEPT:
            raise Broken(f"an answer with status {answer.status} is above {_MOST_KEPT} bytes")
    return body


def _as_error(status: int, body: bytes) -> ApiError:
    """What a replica's answer says is wrong."""
    try:
        error = msgspec.json.decode(body, type=_Told).error
        told = error if isinstance(error, str) else error.message
    except (msgspec.MsgspecError, UnicodeError):
        told = f"the replica answered with status {status}"
    return ApiError(told, status)
