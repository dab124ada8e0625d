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
    relative = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    chosen = [
        root / path
        for path in relative
        if not _LEFT_OUT & set(path.split("/")) and _held_out(path) == (name == "stdlib:validation")
    ]
    if not chosen:
        raise ShardlmError(f"{name}: no Python source under {root}: name text files instead")
    return chosen


def _held_out(relative: str) -> bool:
    """Splits by a hash of the path, so that a file stays on its side when others come and go."""
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4]) % 100 < _VALIDATION_PERCENT


def decode(data: bytes) -> str | None:
    """Source text in the encoding that the file declares (PEP 263); None where it declares none that works."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def materialise(directory: str | os.PathLike) -> tuple[Path, Path]:
    """Writes train.jsonl and validation.jsonl (`text`, `path`); files with that content already stay untouched."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name in NAMES:
        texts = ((path, decode(path.read_bytes())) for path in files(name))
        documents = [{"path": path.name, "text": text} for path, text in texts if text is not None]
        content = b"".join(msgspec.json.encode(document) + b"\n" for document in documents)
        target = directory / f"{name.removeprefix('stdlib:')}.jsonl"
        if not target.exists() or target.read_bytes() != content:
            partial = target.with_name(f".{target.name}.{os.getpid()}")
            partial.write_bytes(content)
            partial.replace(target)
        written.append(target)
    return written[0], written[1]
