"""A connection of the HTTP/1.1 server: what uvicorn leaves out of it. A request's head must have come in time, as a
client may open many connections and send none, and what is no HTTP is answered in OpenAI's form as well."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shardlm.serve.api.errors import ApiError
from shardlm.serve.api.http import encode

HEAD_SECONDS = 30.0


class Connection(HttpToolsProtocol):
    """uvicorn's, closed HEAD_SECONDS after it was made or a request began whose head is not whole by then."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        super().on_headers_complete()

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
