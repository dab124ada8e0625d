"""What processes other than the first do of an engine over several: they connect to the first, and do what it tells."""

import collections
import concurrent.futures
import contextlib
import functools
import logging
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from shardlm.errors import ShardlmError
from shardlm.serve.adapters import placed
from shardlm.serve.alike import built, of_files
from shardlm.serve.engine import Engine
from shardlm.serve.followers import END, MAKE, SETTLE, Followers, Kept
from shardlm.serve.lines import to_followers, to_leader
from shardlm.serve.live_encoder import new_encoder
from shardlm.serve.live_weights import new_draft, new_weights
from shardlm.serve.outputs import EngineError
from shardlm.serve.runner import Runner

log = logging.getLogger(__name__)


def _read(make: Callable[[str, Runner], Any], path: str, files: str, runner: Runner) -> Any:
    """What `make` makes of a checkpoint, whose files are to be the leader's. Raises ShardlmError as it does, or where
    they are not."""
    if of_files(path) != files:
        raise ShardlmError(f"{path} has other weights on this host than process 0 has there; copy them")
    return make(path, runner)


MAKERS = {  # of (arguments, the runner)
    "new_weights": functools.partial(_read, new_weights),
    "new_draft": functools.partial(_read, new_draft),
    "new_encoder": functools.partial(_read, new_encoder),
    "placed": placed,
}
AHEAD = 8  # programs that are started before the first of them is waited for
LOOK_SECONDS = 1.0  # between two looks at what is under way while nothing is told
RESET_SECONDS = 20.0  # after a program failed here, for the leader to find that it failed there too


def join(engine: Engine) -> None:
    """After each of several processes has built the same engine: the first one's leads from now on, and this returns
    there. In the others it follows until that one ends, and then raises SystemExit(0).

    Raises: ShardlmError where an engine is another one than the first's, EngineError where a process has gone.
    """
    if jax.process_count() == 1:
        return
    about = built(engine.runner)
    if jax.process_index() == 0:
        engine.runner.followers = Followers(to_followers(about, jax.process_count()))
        return
    with to_leader(about, jax.process_index()) as connection, _regardless_of_signals():
        log.info("follows process 0")
        follow(engine.runner, connection)
    raise SystemExit(0)


@contextlib.contextmanager
def _regardless_of_signals() -> Iterator[None]:
    """The first SIGTERM or Ctrl-C, which reaches all processes of a job, is the leader's, who lets what runs come to
    its end; the second ends this process."""

    def heard(number: int, _) -> None:
        log.warning("%s: this process ends when process 0 does", signal.Signals(number).name)
        signal.signal(number, before[number])

    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT) if here}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow(runner: Runner, connection: Any) -> None:
    """Does what the leader tells until it ends. Raises EngineError where it went without that, and what goes wrong with
    a program, unless the leader, whose program failed too, has all begin anew."""
    shelf: dict[int, Any] = {}
    programs = _Programs(runner)
    with concurrent.futures.ThreadPoolExecutor(1, "makes") as maker:
        while True:
            name, arguments = _heard(connection, programs)
            if name == END:
                return
            if name == MAKE:
                maker.submit(_make, runner, connection, shelf, *arguments)
            elif name == SETTLE:
                programs.wait(0)
                connection.send_bytes(b"")
            else:
                programs.run(name, [shelf[a.number] if isinstance(a, Kept) else a for a in arguments])


class _Programs:
    """What the runner was told to start, and what went wrong with it."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self._under_way: collections.deque[Any] = collections.deque()
        self._error: Exception | None = None
        self._until = 0.0  # when the error is raised

    def run(self, name: str, arguments: Sequence[Any]) -> None:
        """One of the runner's methods that are told. After an error `reset` alone, which ends that."""
        if name == "reset":
            self._error = None
            self._under_way.clear()
        elif self._error is not None:
            return
        with self._kept():
            found = getattr(self._runner, name)(*arguments)
            self._under_way.extend(found if isinstance(found, list) else [] if found is None else [found])
        self.wait(AHEAD)

    def wait(self, ahead: int) -> None:
        """Until only so many are under way."""
        with self._kept():
            while len(self._under_way) > ahead:
                jax.block_until_ready(self._under_way.popleft().result())

    def look(self) -> None:
        """Raises an error that `reset` has not followed in time: the leader waits in the program that failed here, and
        says nothing more."""
        with self._kept():
            while self._under_way and _ended(self._under_way[0]):
                self.wait(len(self._under_way) - 1)
        if self._error is not None and time.monotonic() > self._until:
            raise self._error

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._error is None:
                log.error("a program failed", exc_info=error)
                self._error, self._until = error, time.monotonic() + RESET_SECONDS
            self._under_way.clear()


def _ended(made: Any) -> bool:
    """Whether a program is through, or has failed."""
    if not made.done():
        return False
    return all(a.is_ready() for a in jax.tree.leaves(made.result()) if isinstance(a, jax.Array))


def _make(
    runner: Runner, connection: Any, shelf: dict[int, Any], number: int, name: str, arguments: tuple, kept: list[int]
) -> None:
    """`kept`: what the leader may still ask for of what was made before."""
    for old in [old for old in shelf if old not in kept]:
        del shelf[old]
    try:
        shelf[number], said = MAKERS[name](*arguments, runner), ""
    except Exception as error:
        if not isinstance(error, ShardlmError):
            log.exception("%s failed", name)
        said = str(error) or type(error).__name__
    connection.send_bytes(said.encode())


def _heard(connection: Any, programs: _Programs) -> tuple[str, tuple]:
    """What is told next; meanwhile looks at what is under way."""
    try:
        while not connection.poll(LOOK_SECONDS):
            programs.look()
        return pickle.loads(connection.recv_bytes())
    except (OSError, EOFError) as error:
        raise EngineError("process 0, which led this one, has gone") from error
