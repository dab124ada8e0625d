"""What processes other than the first do of an engine over several: they connect to the first, and do what it tells."""

import collections
import concurrent.futures
import contextlib
import functools
import logging
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardlm.errors import ShardlmError
from shardlm.serve.adapters import placed
from shardlm.serve.alike import built, of_files
from shardlm.serve.engine import Engine
from shardlm.serve.followers import END, MAKE, SETTLE, Followers, Kept
from shardlm.serve.lines import to_followers, to_leader
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
    "placed": placed,
}
AHEAD = 8  # programs that are started before the first of them is waited for
LOOK_SECONDS = 1.0  # between two looks at what is under way while nothing is told


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
    a program."""
    shelf: dict[int, Any] = {}
    under_way: collections.deque[Any] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(1, "makes") as maker:
        while True:
            name, arguments = _heard(connection, under_way)
            if name == END:
                return
            if name == MAKE:
                maker.submit(_make, runner, connection, shelf, *arguments)
                continue
            if name == SETTLE:
                _wait(under_way, 0)
                connection.send_bytes(b"")
                continue
            found = getattr(runner, name)(*(shelf[a.number] if isinstance(a, Kept) else a for a in arguments))
            under_way.extend(found if isinstance(found, list) else [] if found is None else [found])
            _wait(under_way, AHEAD)


def _wait(under_way: collections.deque[Any], ahead: int) -> None:
    """Until only so many programs are under way. Raises what went wrong with one."""
    while len(under_way) > ahead:
        jax.block_until_ready(under_way.popleft().result())


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


def _heard(connection: Any, under_way: collections.deque[Any]) -> tuple[str, tuple]:
    """What is told next. Meanwhile raises what goes wrong with a program that is under way: the leader waits in the
    same one, and says nothing more."""
    try:
        while not connection.poll(LOOK_SECONDS):
            while under_way and _ended(under_way[0]):
                _wait(under_way, len(under_way) - 1)
        return pickle.loads(connection.recv_bytes())
    except (OSError, EOFError) as error:
        raise EngineError("process 0, which led this one, has gone") from error
