"""What a GGUF file holds (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, as plain values of
Python, and where the bytes of each tensor lie. Knows files and bytes; what they mean is others' business."""

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError

MAGIC = b"GGUF"
# Kinds of tensors by number: (name, numbers in a block, bytes of it), from enum ggml_type and the blocks' structures in
# https://github.com/ggml-org/ggml/blob/master/include/ggml.h and src/ggml-common.h.
KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
BLOCKS = {name: (numbers, size) for name, numbers, size in KINDS.values()}
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q").unpack_from


@dataclasses.dataclass(frozen=True)
class Block:
    """One tensor: its kind, its shape with the dimension that lies side by side last, and where its bytes begin."""

    file: pathlib.Path
    kind: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        numbers, size = BLOCKS[self.kind]
        return math.prod(self.shape) // numbers * size

    def rows(self, first: int, count: int) -> "Block":
        """So many along the first dimension, as a tensor of its own."""
        each = self.nbytes // self.shape[0]
        return dataclasses.replace(self, shape=(count, *self.shape[1:]), begin=self.begin + first * each)

    def item(self, number: int) -> "Block":
        """One of the first dimension, without that."""
        one = self.rows(number, 1)
        return dataclasses.replace(one, shape=one.shape[1:])

    def raw(self) -> np.ndarray:
        """All bytes, uint8 [*shape but the last, blocks of a row, bytes of a block], of which only those are read that
        are looked at. Raises ShardlmError where the file is gone or has become shorter: its map would end the
        process."""
        size, end = self.file.stat().st_size if self.file.exists() else 0, self.begin + self.nbytes
        if size < end:
            raise ShardlmError(
                f"{self.file} has become shorter since it was opened: a tensor ends at byte {end} and the file has "
                f"{size} bytes; download it again and start anew"
            )
        numbers, each = BLOCKS[self.kind]
        shape = (*self.shape[:-1], self.shape[-1] // numbers, each)
        return np.memmap(self.file, np.uint8, "r", self.begin, shape) if self.nbytes else np.empty(shape, np.uint8)


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A model's metadata and tensors, of all its files."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Block]


def is_gguf(file: pathlib.Path) -> bool:
    """Whether a file begins as GGUF does, whatever it is called."""
    try:
        with open(file, "rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def read_one(file: pathlib.Path) -> Gguf:
    """Of one file. Raises ShardlmError that names it for what is no GGUF, cut off, damaged, or of a version or kind
    that is not supported."""
    try:
        size, stream = file.stat().st_size, open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise ShardlmError(f"cannot read {file}: {error.strerror}; check what it is and its permissions") from None
    with stream:
        first = stream.read(24)
        _check_start(file, first, size)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(file, data, size)
            version, tensors, pairs = reader.number("<u4", 4), reader.number("<u8", 8), reader.number("<u8", 16)
            if version not in (2, 3):
                raise ShardlmError(
                    f"{file} is GGUF of version {version}; supported are 2 and 3. Convert the model anew"
                )
            reader.at = 24
            metadata = dict(reader.pair() for _ in range(pairs))
            infos = [reader.tensor() for _ in range(tensors)]
            alignment = metadata.get("general.alignment", 32)
            if type(alignment) is not int or alignment <= 0 or alignment % 8:
                raise reader.damaged(f"general.alignment is {alignment!r}, which is no multiple of 8")
            start = -(-reader.at // alignment) * alignment
    return Gguf(metadata, _placed(file, infos, start, size))


def _check_start(file: pathlib.Path, first: bytes, size: int) -> None:
    if first.startswith(b"version https://git-lfs"):
        raise ShardlmError(f"{file} is a Git LFS pointer, not the model; run `git lfs pull` in its folder")
    if not first.startswith(MAGIC):
        raise ShardlmError(f"{file} is not a GGUF file: it begins with {first[:4]!r} and not {MAGIC!r}")
    if len(first) < 24:
        raise ShardlmError(f"{file} is cut off: {size} bytes; download it again")
    version = int.from_bytes(first[4:8], "little")
    if version & 0xFFFF == 0 and version:
        raise ShardlmError(f"{file} is GGUF for big-endian machines; download or convert it for little-endian ones")
    if version == 1:
        raise ShardlmError(f"{file} is GGUF of version 1; supported are 2 and 3. Convert the model anew")


def _placed(
    file: pathlib.Path, infos: list[tuple[str, str, tuple[int, ...], int]], start: int, size: int
) -> dict[str, Block]:
    """Tensors by name, each inside the file and beside the others."""
    tensors: dict[str, Block] = {}
    for name, kind, shape, offset in infos:
        if name in tensors:
            raise ShardlmError(f"{file} has two tensors {name}; download it again")
        tensors[name] = block = Block(file, kind, shape, start + offset)
        if block.begin + block.nbytes > size:
            raise ShardlmError(
                f"{file} is cut off: {name} ends at byte {block.begin + block.nbytes} of {size}; download it again"
            )
    end, before = start, "the header"
    for name, block in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if block.begin < end:
            raise ShardlmError(f"{file}: {name} overlaps {before}; download the file again")
        end, before = block.begin + block.nbytes, name
    return tensors


@dataclasses.dataclass
class _Reader:
    """Goes through a header; nothing is read beyond the file's end."""

    file: pathlib.Path
    data: mmap.mmap
    size: int
    at: int = 24

    def damaged(self, what: str) -> ShardlmError:
        return ShardlmError(f"{self.file}: {what}; download the file again")

    def need(self, count: int) -> int:
        """Where the next bytes begin, which are then behind."""
        at = self.at
        if count > self.size - at:
            raise ShardlmError(
                f"{self.file} is cut off: its header goes on beyond its end, byte {self.size}; download it again"
            )
        self.at = at + count
        return at

    def number(self, dtype: str, at: int | None = None) -> Any:
        dtype = np.dtype(dtype)
        at = self.need(dtype.itemsize) if at is None else at
        return np.frombuffer(self.data, dtype, 1, at).item()

    def string(self) -> str:
        """As UTF-8; bytes that are none become U+FFFD, as in names that were cut at a length."""
        (length,) = _LENGTH(self.data, self.need(8))
        at = self.need(length)
        return self.data[at : at + length].decode("utf-8", "replace")

    def pair(self) -> tuple[str, Any]:
        key, kind = self.string(), self.number("<u4")
        if kind == _STRING:
            return key, self.string()
        if kind == _ARRAY:
            inner, count = self.number("<u4"), self.number("<u8")
            return key, self.strings(count) if inner == _STRING else self.scalars(key, inner, count)
        return key, self.scalars(key, kind, 1)[0]

    def scalars(self, key: str, kind: int, count: int) -> list:
        if kind not in _SCALARS:
            raise self.damaged(f"{key} is of type {kind}, which is unknown, or an array of arrays")
        dtype = np.dtype(_SCALARS[kind])
        at = self.need(count * dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, at).tolist() if count else []

    def strings(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: as little as can be is done for each."""
        data, size, at, found = self.data, self.size, self.at, []
        if count > (size - at) // 8:
            self.need(count * 8)
        add: Callable[[str], None] = found.append
        for _ in range(count):
            if at + 8 > size:
                self.need(size)
            first = at + 8
            at = first + _LENGTH(data, at)[0]
            if at > size:
                self.need(size)
            add(data[first:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """(name, kind, shape, bytes behind the header's end)."""
        name, dims = self.string(), self.number("<u4")
        if not 0 < dims <= 4:
            raise self.damaged(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed(self.scalars(name, 10, dims)))
        number, offset = self.number("<u4"), self.number("<u8")
        if number not in KINDS:
            known = ", ".join(BLOCKS)
            raise ShardlmError(
                f"{self.file}: tensor {name} is of kind {number}, which shardlm does not know; it knows {known}. "
                "Download another quantisation of the model"
            )
        kind, numbers, _ = KINDS[number]
        if not all(shape) or shape[-1] % numbers:
            raise self.damaged(f"tensor {name} is {kind}{list(shape)}, and {kind} has blocks of {numbers}")
        return name, kind, shape, offset
