"""A client that streams, of any server with OpenAI's API: HTTP/1.1 over asyncio's sockets, a connection a request. It
does as little as can be between the socket and the clock, so that hundreds of streams do not wait for it. No jax."""

import asyncio
import contextlib
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.serve.bench.workload import Job


class RequestError(Exception):
    """The server refused a request, or broke it off."""


class Client:
    """`async for text, tokens in client.stream(job)`."""

    def __init__(self, url: str, key: str = "", model: str = ""):
        """`url` with or without /v1. `model`: what the server calls it, by default what it says (`find_model`)."""
        found = urllib.parse.urlsplit(url)
        try:
            port = found.port or (443 if found.scheme == "https" else 80)
        except ValueError:
            port = 0
        if found.scheme not in ("http", "https") or not found.hostname or not port:
            raise ShardlmError(f"url={url!r} is no address of a server; give http://HOST:PORT")
        self.host, self.port, self.model = found.hostname, port, model
        self._tls = ssl.create_default_context() if found.scheme == "https" else None
        self._base = found.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Host": found.netloc, "Connection": "close", "Accept": "*/*"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def find_model(self) -> str:
        """The first model of /v1/models, from now on that of each request. Raises ShardlmError where there is none."""
        try:
            answer = b"".join([part async for part in self._request("GET", "/v1/models", b"")])
            self.model = json.loads(answer)["data"][0]["id"]
        except (OSError, RequestError, ValueError, LookupError, TypeError) as error:
            raise ShardlmError(f"http://{self.host}:{self.port}/v1/models names no model: {error}") from None
        return self.model

    async def stream(self, job: Job) -> AsyncIterator[tuple[bool, int]]:
        """At each event: (whether it brought text, tokens of the reply so far). Tokens are counted by events until the
        server tells their number, at the end. Raises RequestError, OSError."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **job.body}
        tokens, held = 0, b""
        async with contextlib.aclosing(self._request("POST", job.path, json.dumps(body).encode())) as parts:
            async for part in parts:
                *events, held = (held + part).split(b"\n\n")
                for event in events:
                    if not event.startswith(b"data: {"):
                        continue
                    value = json.loads(event[6:])
                    if "error" in value:
                        raise RequestError(f"the stream ended with {value['error']}")
                    text = _has_text(value)
                    usage = value.get("usage")
                    tokens = usage["completion_tokens"] if usage else tokens + text
                    yield text, tokens

    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """The answer's body, as it comes."""
        reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self._tls, limit=2**24)
        try:
            headers = {**self._headers, "Content-Type": "application/json", "Content-Length": len(body)}
            lines = [f"{method} {self._base}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            parts = _chunks(reader) if "transfer-encoding: chunked" in head else _to_the_end(reader)
            if (status := head.split(" ", 2)[1]) != "200":
                told = b"".join([part async for part in parts])
                raise RequestError(f"{method} {path}: {status}: {told[:500].decode(errors='replace')}")
            async for part in parts:
                yield part
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError) as error:
            raise RequestError(f"{method} {path}: the answer broke off: {error}") from None
        finally:
            writer.close()


def _has_text(value: dict[str, Any]) -> bool:
    """Of an answer or of thoughts before it, under vLLM's names."""
    parts = [part for choice in value.get("choices", ()) for part in (choice, choice.get("delta", {}))]
    return any(part.get(name) for part in parts for name in ("text", "content", "reasoning", "reasoning_content"))


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """https://www.rfc-editor.org/rfc/rfc9112#section-7.1"""
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _to_the_end(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(2**16):
        yield part
