"""A model in one GGUF file or in several, NAME-00001-of-00003.gguf and so on, opened by any of them."""

import functools
import os
import pathlib
import re
from typing import TypeVar

from shardlm.errors import ShardlmError
from shardlm.gguf_files.header import Gguf, read_one

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

Stamp = tuple[str, int, int]
Path = TypeVar("Path", bound=pathlib.PurePath)


def siblings(file: Path) -> list[Path]:
    """All files of a model, in order, by the name of any of them."""
    match = _SPLIT.fullmatch(file.name)
    stem, total = (match[1], match[3]) if match else ("", "0")
    return [file.with_name(f"{stem}-{i:05d}-of-{total}.gguf") for i in range(1, int(total) + 1)] or [file]


def parts(file: pathlib.Path) -> list[pathlib.Path]:
    """The same. Raises ShardlmError that names one that is not there."""
    found = siblings(file)
    for part in found if len(found) > 1 else ():
        if not part.exists():
            raise ShardlmError(f"{file} is one of {len(found)} files, and {part.name} is not beside it; get it too")
    return found


def stamps(file: pathlib.Path) -> tuple[Stamp, ...]:
    """What changes with a model's files: of each its absolute path, size and time."""
    found = []
    for part in parts(file):
        try:
            stat = os.stat(part)
        except OSError as error:
            raise ShardlmError(f"cannot read {part}: {error.strerror}; check what it is") from None
        found.append((str(part.absolute()), stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def read(file: str | os.PathLike) -> Gguf:
    """A model's metadata and the tensors of all its files. Raises ShardlmError as header.read_one, and for files that
    are not parts of one model."""
    return _read(stamps(pathlib.Path(file)))


@functools.lru_cache(maxsize=2)  # a vocabulary takes a tenth of a second and is asked for several times
def _read(stamped: tuple[Stamp, ...]) -> Gguf:
    files = [pathlib.Path(path) for path, _, _ in stamped]
    read = [read_one(file) for file in files]
    first = read[0].metadata
    count = first.get("split.count", 1)
    if count != len(files):
        raise ShardlmError(
            f"{files[0]} says that it is of {count} files, and by its name it is of {len(files)}; give it the name it "
            "was published with, and the others beside it"
        )
    tensors = {}
    for number, (file, one) in enumerate(zip(files, read, strict=True)):
        own = one.metadata.get("split.no", 0)
        if own != number:
            raise ShardlmError(f"{file} says that it is file {own} (from 0) of its model; download it again")
        if twice := next((name for name in one.tensors if name in tensors), None):
            raise ShardlmError(f"{file}: tensor {twice} is in {tensors[twice].file.name} too; download both again")
        tensors |= one.tensors
    told = first.get("split.tensors.count", len(tensors))
    if told != len(tensors):
        raise ShardlmError(f"{files[0]} says {told} tensors, and its files have {len(tensors)}; download them again")
    return Gguf(first, tensors)
