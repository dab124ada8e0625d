"""The images of a token shard on disk: their files as they came, one after the other (`NNNNN.files`), and an index with
the place of each among the tokens (`NNNNN.images`). Files that are the same are kept once in a shard. Which tokens an
image has is rendering.py's; opening shards is shards.py's."""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

INDEX_SUFFIX, FILES_SUFFIX = ".images", ".files"
# first, end: its tokens in the shard, ascending; rows, columns of its vectors; patches that the encoder reads; of its
# file the CRC-32, the place and the bytes.
INDEX = np.dtype(
    [
        ("first", "<i8"),
        ("end", "<i8"),
        ("rows", "<i4"),
        ("columns", "<i4"),
        ("patches", "<i4"),
        ("crc32", "<u4"),
        ("offset", "<i8"),
        ("length", "<i8"),
    ]
)


class ImagesMeta(msgspec.Struct, frozen=True):
    """Of one shard. The index has a checksum of each file, and this one, CRC-32 too, is of the index."""

    num_images: int
    num_bytes: int
    index_crc32: int


class DocumentImage(NamedTuple):
    """An image of a document. first, end: its tokens, those of the document counted from 0; grid: (rows, columns) of
    its vectors; patches: that the encoder reads; file: as it came."""

    first: int
    end: int
    grid: tuple[int, int]
    patches: int
    file: bytes


class ImageFiles:
    """Writes those of one shard."""

    def __init__(self, directory: Path, name: str):
        self._paths = [directory / f"{name}{suffix}" for suffix in (FILES_SUFFIX, INDEX_SUFFIX)]
        self._file = open(self._paths[0], "wb")  # noqa: SIM115
        self._records: list[tuple] = []
        self._kept: dict[bytes, tuple[int, int, int]] = {}  # digest -> (CRC-32, offset, length)
        self._num_bytes = 0

    def add(self, images: Sequence[DocumentImage], begin: int) -> None:
        """`begin`: the token of the shard from which theirs count."""
        for image in images:
            digest = hashlib.blake2b(image.file, digest_size=16).digest()
            if digest not in self._kept:
                self._file.write(image.file)
                self._kept[digest] = (zlib.crc32(image.file), self._num_bytes, len(image.file))
                self._num_bytes += len(image.file)
            place = (begin + image.first, begin + image.end, *image.grid, image.patches)
            self._records.append((*place, *self._kept[digest]))

    def finish(self) -> ImagesMeta:
        """Writes the index."""
        self.close()
        index = np.array(self._records, INDEX).tobytes()
        self._paths[1].write_bytes(index)
        return ImagesMeta(len(self._records), self._num_bytes, zlib.crc32(index))

    def close(self) -> None:
        self._file.close()
