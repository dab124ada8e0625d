"""Append-only files of one JSON object a line that stay valid through kill -9: a torn last line is
tolerated by readers and cut off by the next writer. What the objects mean is for `log` and `goodput`.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import msgspec

from shardlm.errors import ShardlmError
from shardlm.files import cannot_write, write_atomically


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

    def append(self, entry: dict[str, Any]) -> None:
        """Adds one line and hands it to the operating system, so that it outlives a killed process.

        Numbers that are not finite become null, which is what JSON has for them.

        Raises:
            ShardlmError: the disk is full.
        """
        try:
            self._write(msgspec.json.encode(entry) + b"\n")
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _write(self, line: bytes) -> None:
        written = self._file.write(line)
        if written < len(line):  # a full disk may take a part and refuse only the rest
            self._file.write(line[written:])

    def close(self) -> None:
        self._file.close()
