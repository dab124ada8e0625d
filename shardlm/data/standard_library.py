"""The text every machine has: the source code of the running Python's own standard library.

Owns which files count, and their split into train and validation. Tests, tables of data (character
encodings, pydoc topics) and installed packages are left out.
"""

import hashlib
import io
import os
import sysconfig
import tokenize
from pathlib import Path

import msgspec

from shardlm.errors import ShardlmError
from shardlm.files import write_atomically

NAMES = ("stdlib:train", "stdlib:validation")
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_VALIDATION_PERCENT = 5


def files(name: str) -> list[Path]:
    """The files of `stdlib:train` or `stdlib:validation`, in a fixed order.

    Raises:
      ShardlmError: the name is neither, or this Python has no library source on disk.
    """
    if name not in NAMES:
        raise ShardlmError(f"unknown text source {name!r}: the built-in ones are {' and '.join(NAMES)}")
    root = Path(sysconfig.get_path("stdlib"))
    chosen = [root / path for path in _sources(root) if _held_out(path) == (name == "stdlib:validation")]
    if not chosen:
        raise ShardlmError(f"{name}: no Python source under {root}: name text files instead")
    return chosen


def _sources(root: Path) -> list[str]:
    found = []
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        relative = Path(directory).relative_to(root)
        found += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(found)


def _held_out(relative: str) -> bool:
    """Splits by a hash of the path, so that a file stays on its side when others come and go."""
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4]) % 100 < _VALIDATION_PERCENT


def decode(data: bytes) -> str | None:
    """Source text in the encoding that the file declares (PEP 263); None where that does not work."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def materialise(directory: str | os.PathLike) -> tuple[Path, Path]:
    """Writes train.jsonl and validation.jsonl (`text`, `path`), unless they hold just that already.

    Raises:
      ShardlmError: they cannot be written.
    """
    written = []
    for name in NAMES:
        texts = ((path, decode(path.read_bytes())) for path in files(name))
        documents = [{"path": path.name, "text": text} for path, text in texts if text is not None]
        content = b"".join(msgspec.json.encode(document) + b"\n" for document in documents)
        target = Path(directory) / f"{name.removeprefix('stdlib:')}.jsonl"
        if not target.exists() or target.read_bytes() != content:
            write_atomically(target, content)
        written.append(target)
    return written[0], written[1]
