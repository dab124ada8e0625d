"""A process that listens: sockets, TLS, signals. SIGTERM and Ctrl-C end it when its streams have ended, a second one at
once. From its start on the port is its own; who connects is refused until there is a model to answer."""

import asyncio
import contextlib
import dataclasses
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from shardlm.errors import ShardlmError
from shardlm.serve.api.app import make_app
from shardlm.serve.api.connection import Connection
from shardlm.serve.api.settings import HttpSettings, Settings

CONNECTIONS = 65_536
BACKLOG = 2048
# An idle connection is kept for longer than clients keep theirs (httpx 5 seconds, aiohttp 15, nginx 60, Go 90): one who
# asks while it is closed gets no answer. With uvicorn's own 5 seconds 209 and 295 of 900 requests of aiohttp's failed.
IDLE_SECONDS = 120


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
    """Serves `app` until a signal. While it drains, /ready says so and requests under way go on. `started` is called
    when clients are answered and signals heard."""

    def __init__(self, app: Starlette, listen: Listen, started: Callable[[], None] = lambda: None):
        super().__init__(
            uvicorn.Config(
                app,
                log_level="info" if listen.access_log else "warning",
                access_log=listen.access_log,
                ssl_certfile=listen.certificate,
                ssl_keyfile=listen.private_key,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=1,  # all streams have ended, or had their time
                server_header=False,
                lifespan="on",
                http=Connection,
                ws="none",
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_end)
        self._service = app.state.service
        self._listen = listen
        self._say_started = started
        self._draining: asyncio.Task | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # where uvicorn leaves the application as it is, with its connections open
            await self.lifespan.shutdown()

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


def _is_no_end(record: logging.LogRecord) -> bool:
    """Whether a line is to be logged: uvicorn writes a traceback for each request that is cut off at the end, after it
    has told how many those are."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def run(llm, settings: Settings, listen: Listen, held: socket.socket | None = None) -> None:
    """Serves an AsyncLLM, as `run_app` does."""
    run_app(make_app(llm, settings), settings, listen, held)


def hold(listen: Listen, settings: HttpSettings) -> socket.socket:
    """A socket that has the address and does not listen yet, for the minutes that a model takes to be opened and
    compiled: nobody else can listen there, and who connects is refused, as by a server that is not there (vLLM's
    clients wait for that to end). Raises as `run_app` would."""
    if listen.certificate:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(listen.certificate, listen.private_key)
        except OSError as error:
            raise _no_https(listen, error) from None
    with listening(listen, settings.write_seconds) as tried:  # who else holds it is seen by trying to listen alone
        family, address = tried.family, tried.getsockname()
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last server may be closing
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # with it another one could bind and listen first
    except OSError as error:
        sock.close()
        raise _no_address(listen, error) from None
    return sock


def run_app(app: Starlette, settings: HttpSettings, listen: Listen, held: socket.socket | None = None) -> None:
    """Serves an application of `http.application`; returns after a signal, when what was under way has ended. `held`:
    the socket that `hold` gave.

    Raises: ShardlmError where the address is taken or a file for https cannot be used.
    """
    with _listens(held, listen, settings.write_seconds) if held else listening(listen, settings.write_seconds) as sock:
        host, port = sock.getsockname()[:2]
        shown = f"http{'s' * bool(listen.certificate)}://{f'[{host}]' if ':' in host else host}:{port}"
        server = Server(app, listen, lambda: print(shown, flush=True))
        allow_connections()
        try:
            server.config.load()
        except OSError as error:  # ssl's errors are of this class too
            raise _no_https(listen, error) from None
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
        sock = socket.create_server((listen.host, listen.port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise _no_address(listen, error) from None
    return _resetting(sock, write_seconds)


def _listens(held: socket.socket, listen: Listen, write_seconds: float) -> socket.socket:
    """The socket of `hold`, as `listening` gives one."""
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.listen(BACKLOG)
    except OSError as error:
        raise _no_address(listen, error) from None
    return _resetting(held, write_seconds)


def _resetting(sock: socket.socket, write_seconds: float) -> socket.socket:
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * write_seconds))
    return sock


def _no_address(listen: Listen, error: OSError | OverflowError) -> ShardlmError:
    here = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
    remedy = "Give --host an address of this machine" if here else "Take another port, or end what is there"
    return ShardlmError(f"cannot listen at {listen.host} port {listen.port}: {error}. {remedy}")
