"""Files of lines: read a piece at a time on a thread of their own, and written so that only whole lines are found."""

import asyncio
import contextlib
import errno
import fcntl
import os
import pathlib
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator

from shardlm.data.corpus import open_plain
from shardlm.errors import ShardlmError
from shardlm.files import free_space
from shardlm.serve.api.batches.lines import Known

STANDARD = "-"  # the name of what comes in, or goes out, without a file
PIECE = 1 << 16  # bytes read at a time
AHEAD = 2  # pieces that wait
Numbered = tuple[int, bytes | None]  # a line from 1, without its end; None: longer than it may be


class Input:
    """The lines of a file, of a compressed one by its ending (.gz, .zst, .bz2, .lz4), or of the standard input."""

    def __init__(self, path: str, longest: int):
        """Opens it. `longest`: bytes of a line. Raises ShardlmError where it cannot be read."""
        self._path, self._longest = path, longest
        self._stack = contextlib.ExitStack()
        self._position: Callable[[], int] = lambda: 0
        self._size, self._at = 0, 0  # bytes of the file, and how many were read
        self._left = False  # nobody takes lines any more
        if path == STANDARD:
            self._read: Callable[[int], bytes] = lambda count: os.read(0, count)  # as it comes
            return
        try:
            if pathlib.Path(path).is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            file, self._position = self._stack.enter_context(open_plain(pathlib.Path(path)))
            self._read, self._size = file.read1, os.stat(path).st_size
        except OSError as error:
            raise self._unread(error) from None

    def share(self) -> float | None:
        """How much of it has been read, up to 1; None where nobody knows how much there is."""
        return min(1.0, self._at / self._size) if self._size else None

    async def lines(self) -> AsyncGenerator[Numbered, None]:
        """Those with something in them. Raises ShardlmError where it cannot be read on."""
        loop, room = asyncio.get_running_loop(), threading.Semaphore(AHEAD)
        pieces: asyncio.Queue[list[Numbered] | Exception | None] = asyncio.Queue()

        def put(piece: list[Numbered] | Exception | None) -> None:
            room.acquire()
            if not self._left:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        # A daemon: nobody waits at the end for a pipe through which nothing comes.
        threading.Thread(target=self._pump, args=(put,), name="batch input", daemon=True).start()
        try:
            while (piece := await pieces.get()) is not None:
                if isinstance(piece, Exception):
                    raise self._unread(piece) from None
                for one in piece:
                    yield one
                room.release()
        finally:
            self._left = True
            room.release()

    def _pump(self, put: Callable[[list[Numbered] | Exception | None], None]) -> None:
        end = None
        with self._stack, contextlib.suppress(RuntimeError):  # the event loop has ended
            try:
                for piece in numbered(lambda: self._read(PIECE), self._longest):
                    put(piece)
                    if self._left:
                        return
                    self._at = self._position() if self._size else 0  # a pipe has none
                self._at = self._size
            except (OSError, EOFError) as error:
                end = error
            put(end)

    def _unread(self, error: Exception) -> ShardlmError:
        why = getattr(error, "strerror", None) or error
        return ShardlmError(
            f"cannot read {self._path}: {why}; give a file of lines of JSON, or - for the standard input"
        )


def numbered(read: Callable[[], bytes], longest: int) -> Iterator[list[Numbered]]:
    """The lines that end in each piece, until a piece is empty. Those of white space are counted and left out."""
    number, begun, size = 1, [], 0

    def line() -> bytes | None:
        whole = b"".join(begun).strip() if size <= longest else None
        return whole.removeprefix(b"\xef\xbb\xbf") if whole and number == 1 else whole  # as files of some editors begin

    while piece := read():
        found: list[Numbered] = []
        *ends, rest = piece.split(b"\n")
        for end in ends:
            begun.append(end)
            size += len(end)
            if (whole := line()) != b"":
                found.append((number, whole))
            number, begun, size = number + 1, [], 0
        size += len(rest)
        if size <= longest:
            begun.append(rest)
        else:
            begun.clear()
        if found:
            yield found
    if (whole := line()) != b"":
        yield [(number, whole)]


class Output:
    """A file to whose end whole lines are written, each by one call of the system, or the standard output."""

    def __init__(self, path: str, resume: bool, known: Known | None = None):
        """Opens it. `resume`: it may have answers of an earlier run, which `known` has then; half a line at its end, as
        of a process that was killed while it wrote, is cut off.

        Raises: ShardlmError where it cannot be written, is another run's, or has something in it.
        """
        self.path, self.known, self.lines = path, known or Known(), 0  # lines: that were there
        if path == STANDARD:
            if resume:
                raise ShardlmError(
                    "--resume reads what an earlier run wrote: give a file as --output_file, or leave it out"
                )
            sys.stdout.flush()
            self._file, self._regular = os.dup(1), False
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unwritten(error) from None
        try:
            self._regular = os.path.isfile(path)
            if self._regular:
                self._lock()
                self._look(resume)
        except BaseException:
            self.close()
            raise

    def write(self, line: bytes) -> None:
        """Raises ShardlmError where there is no room for all of it; nothing of it is left then."""
        before = os.fstat(self._file).st_size if self._regular else 0
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            if self._regular:
                os.ftruncate(self._file, before)
            raise self._unwritten(error) from None

    def close(self) -> None:
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShardlmError(f"{self.path} is being written by another run; give another --output_file") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
                raise self._unwritten(error) from None

    def _look(self, resume: bool) -> None:
        """Notes what is answered, and cuts off what has no end."""
        size, end = os.fstat(self._file).st_size, 0
        if size and not resume:
            raise ShardlmError(
                f"{self.path} is there and has {size:,} bytes: --resume answers the lines that it lacks; or give "
                "another --output_file"
            )
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if not self.known.had(line):
                    raise ShardlmError(
                        f"line {self.lines + 1} of {self.path} is no answer of a batch: --resume goes on with what an "
                        "earlier run wrote; give another --output_file"
                    )
                end, self.lines = end + len(line), self.lines + 1
        os.ftruncate(self._file, end)

    def _unwritten(self, error: OSError) -> ShardlmError:
        room = f" ({free_space(pathlib.Path(self.path))})" if error.errno == errno.ENOSPC else ""
        return ShardlmError(
            f"cannot write {self.path}: {error.strerror or error}{room}; name a file that can be written, in a folder "
            "that is there. What was answered is kept: --resume goes on"
        )
