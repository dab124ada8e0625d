"""The way to a replica and back: one request to one of them, until its first bytes, and then the rest.

aiohttp's client, since it takes 14 to 15 us of CPU an event at 64 streams, where httpx2 took 29 to 43 on the same
machine, and a response that is closed closes its connection.
"""

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

import aiohttp
import yarl

from shardlm.errors import ShardlmError
from shardlm.serve.api.http import only_pings
from shardlm.serve.router.fleet import Replica

Header = tuple[bytes, bytes]
_SILENCE = 20  # seconds after which a host is asked for a sign of life
# RFC 9110, 7.6.1: of one connection, not of a request. `host` and `content-length` are made anew.
_OF_THE_CONNECTION = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade"),
}
_ENDS = {"text/event-stream": b"\n\n", "application/x-ndjson": b"\n"}  # of an event, or a line
_NOT_HANDED_ON = _OF_THE_CONNECTION | {b"date"}
_SET_BY_US = _OF_THE_CONNECTION | {b"host", b"content-length", b"expect"}


class Nothing(Exception):
    """The replica has produced nothing of the answer. `refused`: it takes no connections at all."""

    def __init__(self, reason: str, *, refused: bool = False):
        super().__init__(reason)
        self.refused = refused


class Broken(Exception):
    """The answer ended before its end."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request. target: path and query, as they came."""

    method: str
    target: str
    headers: Sequence[Header]
    body: bytes


@dataclasses.dataclass
class Answer:
    """status, headers and the first bytes of the body (none: it has none) of an answer that has begun."""

    status: int
    headers: list[Header]
    first: bytes
    _response: aiohttp.ClientResponse

    def is_between_events(self, last: bytes) -> bool:
        """Whether an event may follow these bytes of it."""
        end = _ENDS.get(self._response.content_type)
        return end is not None and (last.endswith(end) or only_pings(last))

    async def rest(self) -> AsyncIterator[bytes]:
        """Raises Broken."""
        try:
            while chunk := await self._response.content.readany():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            raise Broken(str(error) or type(error).__name__) from None


def trust(authorities: str) -> ssl.SSLContext:
    """Raises ShardlmError for a file of authorities that is none."""
    try:
        return ssl.create_default_context(cafile=authorities or None)
    except OSError as error:
        raise ShardlmError(f"replica_ca={authorities} is no file of certificates in PEM: {error}") from None


def session(connect_seconds: float, trusted: ssl.SSLContext) -> aiohttp.ClientSession:
    """Called in the loop that uses it."""
    # Servers close connections that rest for 5 s (uvicorn); one that is closed as it is used again would cost a retry.
    connector = aiohttp.TCPConnector(limit=0, ssl=trusted, keepalive_timeout=3, socket_factory=_socket)
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "user-agent", "content-type"),
    )


def _socket(info: aiohttp.AddrInfoType) -> socket.socket:
    """A host that vanished without a word is noticed after about 35 seconds, not after the system's two hours."""
    made = socket.socket(*info[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _SILENCE), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


def is_refusal(error: Exception) -> bool:
    """Nobody listens there; as against a host that is slow, or files that this process has no more of."""
    return isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError)


@contextlib.asynccontextmanager
async def ask(
    client: aiohttp.ClientSession, replica: Replica, asked: Asked, waits: Callable[[Answer], Awaitable[None]]
) -> AsyncIterator[Answer]:
    """The answer, once its body has begun. Whoever leaves before its end closes the connection, which is what tells the
    replica to give up the request. `waits` is called with signs of life in the place of its first bytes, before it has
    begun.

    Raises: Nothing, also when the replica is lost meanwhile.
    """
    response = None
    try:
        try:
            async with asyncio.timeout(None) as timeout:
                replica.waiting.add(timeout)
                try:
                    response = await client.request(
                        asked.method,
                        yarl.URL(replica.url + asked.target, encoded=True),
                        headers=[(name.decode("latin-1"), _text(value)) for name, value in _kept(asked.headers)],
                        data=asked.body or None,
                        allow_redirects=False,
                    )
                    headers = [pair for pair in response.raw_headers if pair[0].lower() not in _NOT_HANDED_ON]
                    while only_pings(first := await response.content.readany()):
                        await waits(Answer(response.status, headers, first, response))
                finally:
                    replica.waiting.discard(timeout)
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            raise Nothing(str(error) or "the replica was lost", refused=is_refusal(error)) from None
        yield Answer(response.status, headers, first, response)
    finally:
        if response is not None:
            if response.content.at_eof():
                response.release()
            else:
                response.close()


def _text(value: bytes) -> str:
    """Of which aiohttp makes the same bytes again, in UTF-8, as keys are: read as Latin-1 they were no longer known."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _kept(headers: Iterable[Header]) -> list[Header]:
    """Without what is of this connection alone, and what `Connection` names."""
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    return [(name, value) for name, value in headers if name.lower() not in _SET_BY_US | named]
