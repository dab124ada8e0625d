"""A process that listens: sockets, TLS, signals. SIGTERM and Ctrl-C end it when its streams have ended, a second one at
once."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import socket
import ssl
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from shardlm.errors import ShardlmError
from shardlm.serve.api.app import make_app
from shardlm.serve.api.connection import Connection
from shardlm.serve.api.settings import HttpSettings, Settings

CONNECTIONS = 65_536


@dataclasses.dataclass(frozen=True)
class Listen:
    """
    host, port      where; port 0 takes a free one
    certificate     files in PEM, for https: the chain
    private_key     and its key
    access_log      a line for each request
    drain_seconds   at the end, streams may go on for so long; None: to their ends
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: str | None = None
    private_key: str | None = None
    access_log: bool = False
    drain_seconds: float | None = None

    def __post_init__(self):
        if bool(self.certificate) != bool(self.private_key):
            raise ShardlmError("https needs both files, the certificate and its private key; give both or none")


class Server(uvicorn.Server):
    """Serves `app` until a signal. While it drains, /ready says so and requests under way go on."""

    def __init__(self, app: Starlette, listen: Listen):
        super().__init__(
            uvicorn.Config(
                app,
                log_level="info" if listen.access_log else "warning",
                access_log=listen.access_log,
                ssl_certfile=listen.certificate,
                ssl_keyfile=listen.private_key,
                timeout_graceful_shutdown=1,  # all streams have ended, or had their time
                server_header=False,
                lifespan="on",
                http=Connection,
                ws="none",
            )
        )
        self._service = app.state.service
        self._listen = listen
        self._draining: asyncio.Task | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second ends the process. Called between two instructions of the main thread."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        logging.warning("no new requests; the server ends when those under way have")
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        try:
            async with asyncio.timeout(self._listen.drain_seconds):
                await self._service.drain()
        except TimeoutError:
            logging.warning("%g seconds are over; the rest is cut off", self._listen.drain_seconds)
        finally:
            self.should_exit = True


def run(llm, settings: Settings, listen: Listen) -> None:
    """Serves an AsyncLLM, as `run_app` does."""
    run_app(make_app(llm, settings), settings, listen)


def try_to_listen(listen: Listen, settings: HttpSettings) -> None:
    """Raises as `run_app` would: before the minutes that a model takes to be opened and compiled."""
    if listen.certificate:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(listen.certificate, listen.private_key)
        except OSError as error:
            raise _no_https(listen, error) from None
    listening(listen, settings.write_seconds).close()


def run_app(app: Starlette, settings: HttpSettings, listen: Listen) -> None:
    """Serves an application of `http.application`; returns after a signal, when what was under way has ended.

    Raises: ShardlmError where the address is taken or a file for https cannot be used.
    """
    server = Server(app, listen)
    allow_connections()
    try:
        server.config.load()
    except OSError as error:  # ssl's errors are of this class too
        raise _no_https(listen, error) from None
    with listening(listen, settings.write_seconds) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"http{'s' * bool(listen.certificate)}://{shown}:{port}", flush=True)
        server.run([sock])


def allow_connections() -> None:
    """As many open files as the system lets a process have, up to CONNECTIONS: each client is one, and a router's is
    two. Many systems begin at 1,024, from where on clients were cut off and a router lost replicas that were well."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS if most == resource.RLIM_INFINITY else min(CONNECTIONS, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(ValueError, OSError):  # some containers forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _no_https(listen: Listen, error: OSError) -> ShardlmError:
    return ShardlmError(
        f"https with {listen.certificate} and {listen.private_key} does not work: {error}. Give a certificate chain "
        "and its private key in PEM"
    )


def listening(listen: Listen, write_seconds: float) -> socket.socket:
    """A socket that listens. The kernel resets connections that take nothing for twice `write_seconds`."""
    try:
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        sock = socket.create_server((listen.host, listen.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        here = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        remedy = "Give --host an address of this machine" if here else "Take another port, or end what is there"
        raise ShardlmError(f"cannot listen at {listen.host} port {listen.port}: {error}. {remedy}") from None
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * write_seconds))
    return sock
