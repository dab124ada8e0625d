"""One engine over the devices of several processes. Process 0 leads: it has the clients, the scheduler and the numbers
of pages. The others follow (following.py): each starts the same programs on its own devices, in the same order, with
the arrays of the host that it is told. They hand out nothing: what programs sample is whole on the leader's devices.

Told are the calls of those methods of a runner that are marked `told`, before the leader makes them. Weights are no
arrays of a host: each process makes its own part of them (`everywhere`), and is told which to take (`Kept`).
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from shardlm.distributed import at_end
from shardlm.errors import ShardlmError
from shardlm.serve.outputs import EngineError

MAKE, SETTLE, END = "make", "settle", "end"
LARGE = 2**20  # bytes of an array
SETTLE_SECONDS = 60.0  # for programs that were started: a few steps


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """What every process has made of the same files, its own part of it; its number is what is told."""

    number: int
    value: Any = None


@dataclasses.dataclass(frozen=True)
class Line:
    """To one of the other processes."""

    process: int
    connection: Connection


class Followers:
    """The other processes, as the leader has them. Any thread may call."""

    def __init__(self, lines: Sequence[Line]):
        self._lines = tuple(lines)
        self._telling, self._making = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._kept: weakref.WeakSet[Kept] = weakref.WeakSet()
        self._wrong = ""  # why nothing can be told any more
        _leading.add(self)
        at_end(self.end)

    def tell(self, name: str, *arguments: Any) -> None:
        """Has all of them do what `name` says, after what they were told before; nobody waits. Raises EngineError where
        one has gone, or this process and they are no longer at the same place."""
        said = pickled((name, arguments))
        with self._telling:
            if self._wrong:
                raise EngineError(self._wrong)
            for line in self._lines:
                try:
                    line.connection.send_bytes(said)
                except OSError as error:
                    raise _gone(line) from error

    def make(self, name: str, arguments: Sequence[Any], own: Callable[[], Any]) -> Kept:
        """What `own` makes here and following.MAKERS[name] of these arguments there, at the same time, beside the
        programs. Raises as `own` does, ShardlmError where another process could not, EngineError where one has gone."""
        with self._making:
            number = next(self._numbers)
            self.tell(MAKE, number, name, arguments, sorted(kept.number for kept in self._kept))
            with self._whole():
                try:
                    value = own()
                finally:
                    answers = [_answer(line) for line in self._lines]
            said = {line.process: answer for line, answer in zip(self._lines, answers, strict=True) if answer}
            if said:
                raise ShardlmError("; ".join(f"process {process}: {answer}" for process, answer in said.items()))
            kept = Kept(number, value)
            self._kept.add(kept)  # before another is made, which says which of the older ones may be dropped
            return kept

    def settle(self) -> None:
        """After a program failed here: waits until they are through with all that they were told. Raises EngineError
        where one is not, as it waits in a collective for the program that failed: what comes next would meet that."""
        with self._making:
            self.tell(SETTLE)
            with self._whole():
                for line in self._lines:
                    if not line.connection.poll(SETTLE_SECONDS):
                        self._wrong = (
                            f"process {line.process} did not come to the end of its programs in {SETTLE_SECONDS:g} s "
                            "after one failed here; start all of them again"
                        )
                        raise EngineError(self._wrong)
                    _answer(line)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.interrupted(error)
            raise

    def interrupted(self, error: BaseException) -> None:
        """By Ctrl-C, in the midst of what all processes do: nobody knows how far this one has come."""
        self._wrong = (
            f"{type(error).__name__} came while a program was started that all processes run; start all of them again"
        )

    def end(self) -> None:
        """They end. Nothing more can be told."""
        with contextlib.suppress(EngineError):
            self.tell(END)
        with self._telling:
            self._wrong = self._wrong or "the other processes of the engine have been told to end"
            for line in self._lines:
                line.connection.close()
            self._lines = ()
            _leading.discard(self)


_leading: weakref.WeakSet[Followers] = weakref.WeakSet()  # of this process, not ended


def refuse_second() -> None:
    """Raises ShardlmError, before an engine is built, where the other processes follow another one of this process:
    they would not come to build theirs."""
    if _leading:
        raise ShardlmError(
            "the other processes serve the engine that was made before, and come to no second one: make one for all "
            "calls, or end that first (llm.engine.runner.followers.end())"
        )


def pickled(what: Any) -> memoryview:
    """For pickle.loads. Of large arrays that are mostly zeros, such as tables of pages, the other numbers alone."""
    written = io.BytesIO()
    _Pickler(written, protocol=pickle.HIGHEST_PROTOCOL).dump(what)
    return written.getbuffer()


class _Pickler(pickle.Pickler):
    def reducer_override(self, a: Any) -> Any:
        if type(a) is not np.ndarray or a.nbytes < LARGE:
            return NotImplemented
        places = np.flatnonzero(a)
        if 2 * len(places) > a.size:
            return NotImplemented
        return _filled, (a.shape, a.dtype, places.astype(np.uint32), a.ravel()[places])


def _filled(shape: tuple[int, ...], dtype: np.dtype, places: np.ndarray, values: np.ndarray) -> np.ndarray:
    a = np.zeros(shape, dtype)
    a.ravel()[places] = values
    return a


def told(method: Callable) -> Callable:
    """A method of a runner that followers call too, with the same arguments: of the host, or Kept."""

    @functools.wraps(method)
    def both(self, *arguments):
        if self.followers is None:
            return method(self, *arguments)
        numbers = [Kept(a.number) if isinstance(a, Kept) else a for a in arguments]
        try:
            self.followers.tell(method.__name__, *numbers)
            return method(self, *(a.value if isinstance(a, Kept) else a for a in arguments))
        except Exception:
            raise
        except BaseException as error:
            self.followers.interrupted(error)
            raise

    return both


def everywhere(runner: Any, name: str, arguments: Sequence[Any], own: Callable[[], Any]) -> Any:
    """What `own` makes; with followers as Followers.make, and then Kept."""
    return own() if runner.followers is None else runner.followers.make(name, arguments, own)


def _answer(line: Line) -> str:
    try:
        return line.connection.recv_bytes().decode()
    except (OSError, EOFError) as error:
        raise _gone(line) from error


def _gone(line: Line) -> EngineError:
    return EngineError(f"process {line.process}, which has a part of the model, has gone; start all of them again")
