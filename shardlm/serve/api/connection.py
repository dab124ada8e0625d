"""A connection of the HTTP/1.1 server: what uvicorn leaves out of it. A request's head must have come in time, as a
client may open many connections and send none; what is no HTTP is answered in OpenAI's form as well; and an offer to
go on in HTTP/2 is not heard, which its parser would take for the end of the request, body or not. Java's own client
makes that offer with the first request of each connection."""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.http import encode

HEAD_SECONDS = 30.0
_OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)


class Connection(HttpToolsProtocol):
    """uvicorn's, closed HEAD_SECONDS after it was made or a request began whose head is not whole by then."""

    _late: asyncio.TimerHandle | None = None
    _in_body = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:  # a head begins, or goes on
            end = data.find(b"\r\n\r\n")
            if offer := _OFFER.search(data, 0, len(data) if end < 0 else end + 2):
                data = data[: offer.start()] + data[offer.end() :]
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._head_is_here()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Where uvicorn could not parse what came."""
        body = encode(ApiError(msg).body())
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        self.transport.close()

    def _expect_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _head_is_here(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
