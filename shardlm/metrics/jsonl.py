"""Append-only files of one JSON object a line that stay valid through kill -9: a torn last line is
tolerated by readers and cut off by the next writer. What the objects mean is for `log` and `goodput`.
"""

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from shardlm.errors import ShardlmError
from shardlm.files import cannot_write, write_atomically

log = logging.getLogger(__name__)

WAITING = 1 << 20  # bytes of lines that may wait for room on the disk


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of `path`, oldest first; none where there is no file. A torn last line is left out.

    Raises:
        ShardlmError: a line other than the last is not a JSON object.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return [_decode(path, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _decode(path: pathlib.Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ShardlmError(
            f"Line {number} of {path} is not a JSON object ({error}): the file was damaged or edited. "
            f"Delete that line ('sed -i {number}d {path}') and run the command again."
        ) from error


class JsonLines:
    """The writer of such a file. Opening it cuts off a torn last line and drops what `keep` refuses."""

    def __init__(self, path: pathlib.Path, keep: Callable[[dict[str, Any]], bool] = lambda _: True):
        """`keep` decides about each object that is there already, as after a resume at an earlier step.

        Raises:
            ShardlmError: the file is damaged other than at its end, or cannot be written.
        """
        self.path = path
        kept = b"".join(msgspec.json.encode(entry) + b"\n" for entry in read(path) if keep(entry))
        if not path.exists() or kept != path.read_bytes():
            write_atomically(path, kept)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._wrote = False
        self._waiting = b""  # of lines that the disk would not take

    def append(self, entry: dict[str, Any]) -> None:
        """Adds one line and hands it to the operating system, so that it outlives a killed process. Where the disk
        takes none, as it did before, the line waits for the next one, with a warning: a full disk may have room again,
        and a run that ends loses its steps since the last checkpoint.

        Numbers that are not finite become null, which is what JSON has for them.

        Raises:
            ShardlmError: not one line can be written, or more than WAITING bytes wait.
        """
        begun = bool(self._waiting)
        self._waiting += msgspec.json.encode(entry) + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._wrote or len(self._waiting) > WAITING:
                raise cannot_write(self.path, error) from error
            if not begun:
                log.warning("%s: %s; its lines wait for room, and the run goes on", self.path, error.strerror or error)

    def _write(self) -> None:
        while self._waiting:  # a full disk may take a part and refuse only the rest
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        self._wrote = True

    def close(self) -> None:
        """Raises:
        ShardlmError: lines wait, and still cannot be written.
        """
        try:
            self._write()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            self._file.close()
