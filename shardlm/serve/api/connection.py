"""A connection of the HTTP/1.1 server: what uvicorn leaves out of it. A request's head must have come in time, as a
client may open many connections and send none, and be whole within HEAD_BYTES, as its parser would hold however much
came; what is no HTTP is answered in OpenAI's form as well; and an offer to go on in HTTP/2 is not heard, which its
parser would take for the end of the request, body or not. Java's own client makes that offer with the first request of
each connection.

Where a client sends several requests at once, up to AT_ONCE, all of them end when it goes: uvicorn tells the last one
alone, which has not begun, and does not read that the client has gone before the others are answered.

A client of HTTP/1.0 knows no chunks: what has no length ends with the connection. One that says it will send no more
(`nc -N`) waits for its answer all the same (https://www.rfc-editor.org/rfc/rfc9112#section-9.6), and looks like one
that has gone until something is written to it.
"""

import asyncio
import re
from typing import Any

from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.http import encode

HEAD_SECONDS = 30.0
HEAD_BYTES = 65_536
AT_ONCE = 16  # requests of a connection
ASK_SECONDS = 0.5, 30.0  # between two questions whether a client is there, at first and at most
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # before an answer as often as a server likes, and read over
_OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """uvicorn's, closed HEAD_SECONDS after it was made or a request began whose head is not whole by then."""

    _late: asyncio.TimerHandle | None = None
    _in_body = False
    _head = 0  # bytes of one that have come

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cycles: list[Any] = []  # requests that are not answered

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:  # a head begins, or goes on
            end = data.find(b"\r\n\r\n")
            if offer := _OFFER.search(data, 0, len(data) if end < 0 else end + 2):
                data = data[: offer.start()] + data[offer.end() :]
            self._head += len(data)  # which a head that is whole sets back
        super().data_received(data)
        if self._head > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", f"the request's head is above {HEAD_BYTES} bytes")

    def on_headers_complete(self) -> None:
        self._in_body, self._head = True, 0
        self._head_is_here()
        super().on_headers_complete()
        self._cycles = [one for one in self._cycles if not one.response_complete] + [self.cycle]
        if self.pipeline and len(self._cycles) < AT_ONCE:
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def eof_received(self) -> bool:
        """Whether the connection is kept open: the client sends no more, and what it asked is not answered. What is
        written to it from now on fails where it has gone, which ends its request; before an answer to HTTP/1.0 nothing
        can be, nor does TLS leave half of a connection open."""
        cycle = self.cycle
        if self.scheme == "https" or self.pipeline or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if not cycle.response_started and self.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        self._head_is_here()
        self._ask(cycle, ASK_SECONDS[0])
        return True

    def _ask(self, cycle: Any, seconds: float) -> None:
        """Whether the client of a request is there, until there is an answer."""
        if not cycle.response_started and not self.transport.is_closing():
            self.transport.write(CONTINUE)
            self.loop.call_later(seconds, self._ask, cycle, min(2 * seconds, ASK_SECONDS[1]))

    def send_400_response(self, msg: str) -> None:
        """Where uvicorn could not parse what came."""
        self._refuse(b"400 Bad Request", msg)

    def _refuse(self, status: bytes, message: str) -> None:
        body = encode(ApiError(message).body())
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n" % status
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_is_here(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _unchunked(cycle: Any) -> Send:
    """uvicorn's own `send`, which chunks what comes without its length, without that."""
    send, open_end = cycle.send, False

    async def plain(message: Message) -> None:
        nonlocal open_end
        if message["type"] == "http.response.start":
            open_end = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if open_end else None  # None: not known yet
        elif open_end:
            cycle.expected_content_length = len(message.get("body", b""))  # of which uvicorn wants as much to come
        await send(message)

    return plain
