"""Token shards on disk, memory-mapped: the format and its reader.

A directory holds `meta.json` and, per shard, `NNNNN.tokens` (uint16, or uint32 for vocabularies over 65,536;
every document followed by the end-of-document token), `NNNNN.offsets` (int64, the first token of each
document, then the number of tokens) and, where only some tokens are learned (chats.py), `NNNNN.scored` (one
byte a token, 1 or 0), and where documents have images those files of stored_images.py. `meta.json` is written last: a
directory without it is unfinished.
Writing is `writer`'s; turning tokens into rows is `packing`'s.
"""

import bisect
import hashlib
import itertools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shardlm.data.stored_images import FILES_SUFFIX, INDEX, INDEX_SUFFIX, ImagesMeta
from shardlm.errors import ShardlmError

META = "meta.json"
FORMAT = 1
FORMAT_WITH_IMAGES = 2  # of directories with some
_VERIFY_BYTES = 1 << 24


class ShardMeta(msgspec.Struct, frozen=True):
    """One shard. Checksums are CRC-32 of the files."""

    name: str
    num_tokens: int
    num_documents: int
    tokens_crc32: int
    offsets_crc32: int
    scored_crc32: int | None = None  # None: all tokens are learned
    # Left out where there are none, so that shards of text have the fingerprints that they had before there were any.
    images: ImagesMeta | msgspec.UnsetType = msgspec.UNSET


class Meta(msgspec.Struct, frozen=True):
    """meta.json. `num_bytes` is the UTF-8 size of the text, without end-of-document tokens."""

    format: int
    dtype: str
    vocab_size: int
    tokenizer: str  # Tokenizer.fingerprint
    num_tokens: int
    num_documents: int
    num_bytes: int
    num_bad_utf8: int  # documents skipped or repaired because they were not UTF-8
    shards: tuple[ShardMeta, ...]
    image_token: int | msgspec.UnsetType = msgspec.UNSET  # that stands for each vector of an image


class ShownImage(NamedTuple):
    """An image of a document. shard: of the stream; number: in its index; first, end: its tokens in the stream; grid:
    (rows, columns) of its vectors; patches: that the encoder reads."""

    shard: int
    number: int
    first: int
    end: int
    grid: tuple[int, int]
    patches: int


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def is_shards(path: str | Path) -> bool:
    """Whether `path` is a directory of shards, finished or not."""
    path = Path(path)
    return (path / META).is_file() or any(path.glob("[0-9]*.tokens"))


class TokenShards:
    """The tokens of one or more shard directories as one stream. Immutable; opening reads no tokens.

    Attributes:
      vocab_size, tokenizer: of the tokenizer that made them: its size and its fingerprint.
      num_tokens, num_documents: with the end-of-document tokens.
      num_bytes: UTF-8 bytes of the text, the denominator of bits per byte.
      num_bad_utf8: documents skipped or repaired because they were not UTF-8.
      image_token: that stands for each vector of an image; None where there are no images.
      fingerprint: equal for equal tokens and images, wherever the files lie.
    """

    def __init__(self, directories: Sequence[Path], metas: Sequence[Meta]):
        self.directories = tuple(directories)
        self.vocab_size = metas[0].vocab_size
        self.tokenizer = metas[0].tokenizer
        self.num_tokens = sum(meta.num_tokens for meta in metas)
        self.num_documents = sum(meta.num_documents for meta in metas)
        self.num_bytes = sum(meta.num_bytes for meta in metas)
        self.num_bad_utf8 = sum(meta.num_bad_utf8 for meta in metas)
        shards = [(d, meta, shard) for d, meta in zip(directories, metas, strict=True) for shard in meta.shards]
        self._shards = [shard for _, _, shard in shards]
        self._paths = [(d / f"{s.name}.tokens", d / f"{s.name}.offsets") for d, _, s in shards]
        self._tokens = [_map(d / f"{s.name}.tokens", np.dtype(m.dtype), s.num_tokens) for d, m, s in shards]
        self._offsets = [_map_offsets(d / f"{s.name}.offsets", s) for d, _, s in shards]
        self._scored = [
            None if s.scored_crc32 is None else _map(d / f"{s.name}.scored", np.dtype(np.uint8), s.num_tokens)
            for d, _, s in shards
        ]
        self.image_token = next((m.image_token for m in metas if m.image_token is not msgspec.UNSET), None)
        self._images = [_Images.open(d / s.name, s) for d, _, s in shards]
        # The token at which each shard begins, then the total.
        self._begins = [0, *itertools.accumulate(shard.num_tokens for shard in self._shards)]
        self.fingerprint = hashlib.sha256(
            msgspec.json.encode([(m.vocab_size, m.tokenizer, m.dtype, m.shards) for m in metas])
        ).hexdigest()

    @classmethod
    def open(cls, *directories: str | Path) -> "TokenShards":
        """Opens shard directories, one after the other in the stream.

        Raises:
          ShardlmError: one is missing, unfinished or damaged, or they come from different tokenizers.
        """
        paths = [Path(directory) for directory in directories]
        metas = [_read_meta(path) for path in paths]
        for path, meta in zip(paths, metas, strict=True):
            if (meta.tokenizer, meta.vocab_size) != (metas[0].tokenizer, metas[0].vocab_size):
                raise ShardlmError(
                    f"{paths[0]} and {path} were made by different tokenizers, of vocabulary"
                    f" {metas[0].vocab_size} and {meta.vocab_size}: tokenise both with the same one"
                )
        if len(tokens := {meta.image_token for meta in metas if meta.image_token is not msgspec.UNSET}) > 1:
            raise ShardlmError(
                f"the images of {', '.join(map(str, paths))} were prepared for different models: their tokens are"
                f" {', '.join(map(str, sorted(tokens)))}; prepare the conversations with one"
            )
        return cls(paths, metas)

    @classmethod
    def join(cls, parts: "Sequence[TokenShards]") -> "TokenShards":
        """One after the other in one stream. Raises ShardlmError as `open`."""
        return parts[0] if len(parts) == 1 else cls.open(*(path for part in parts for path in part.directories))

    @property
    def num_shards(self) -> int:
        """Over all directories."""
        return len(self._shards)

    @property
    def partly_scored(self) -> bool:
        """Whether only some tokens are learned."""
        return any(scored is not None for scored in self._scored)

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text a token: bits per byte = nats per token / ln 2 / this."""
        return self.num_bytes / self.num_tokens

    def window(self, start: int, length: int) -> np.ndarray:
        """int32[<= length]: the tokens from `start` on, across shards, fewer at the end of the stream.

        Raises:
          ShardlmError: a token is not in the vocabulary, so the file is damaged.
        """
        length = max(0, min(length, self.num_tokens - start))
        out = np.empty(length, np.int32)
        for shard, low, high in self._spans(start, start + length):
            part = self._tokens[shard][low:high]
            at = self._begins[shard] + low - start  # where in the window
            if (worst := int(part.max())) >= self.vocab_size:
                where = f"between positions {low} and {high}"
                raise _damaged(self._paths[shard][0], f"token {worst} {where}, vocabulary {self.vocab_size}")
            out[at : at + high - low] = part
        return out

    def scored(self, start: int, length: int) -> np.ndarray:
        """bool[<= length]: whether the tokens from `start` on are learned, as targets."""
        out = np.ones(max(0, min(length, self.num_tokens - start)), bool)
        for shard, low, high in self._spans(start, start + len(out)):
            if self._scored[shard] is not None:
                at = self._begins[shard] + low - start
                out[at : at + high - low] = self._scored[shard][low:high]
        return out

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """int64[n]: the positions in [start, stop) at which a document begins, ascending."""
        parts = [np.empty(0, np.int64)]
        for shard, low, high in self._spans(start, min(stop, self.num_tokens)):
            offsets = self._offsets[shard]
            first, last = np.searchsorted(offsets, (low, high))
            parts.append(offsets[first:last] + self._begins[shard])
        return np.concatenate(parts)

    def document_offsets(self) -> np.ndarray:
        """int64[num_documents + 1]: where each document begins, then `num_tokens` (8 bytes a document)."""
        parts = [offsets[:-1] + begin for offsets, begin in zip(self._offsets, self._begins, strict=False)]
        return np.concatenate([*parts, [self.num_tokens]])

    def image_places(self) -> np.ndarray:
        """int64[images]: the first token of each image, ascending (8 bytes an image)."""
        parts = [np.empty(0, np.int64)]
        return np.concatenate([*parts, *(i.first + b for i, b in zip(self._images, self._begins, strict=False) if i)])

    def images(self, start: int, stop: int) -> list[ShownImage]:
        """Those whose first token is in [start, stop), in their order."""
        found = []
        for shard, low, high in self._spans(start, min(stop, self.num_tokens)):
            if (images := self._images[shard]) is None:
                continue
            for number in range(*np.searchsorted(images.first, (low, high)).tolist()):
                _, end, rows, columns, patches, *_ = images.index[number].item()
                first, begin = int(images.first[number]), self._begins[shard]
                found.append(ShownImage(shard, number, begin + first, begin + end, (rows, columns), patches))
        return found

    def takes(self, image: ShownImage) -> np.ndarray:
        """int32[vectors]: which of an image's tokens, counted from its first, take its vectors, in their order.

        Raises:
          ShardlmError: they are others in number, so that a file is damaged."""
        found = np.flatnonzero(self.window(image.first, image.end - image.first) == self.image_token).astype(np.int32)
        if len(found) != image.grid[0] * image.grid[1]:
            what = f"image {image.number} has {len(found)} tokens for {image.grid[0]} x {image.grid[1]} vectors"
            raise _damaged(self._paths[image.shard][0], what)
        return found

    def file_at(self, image: ShownImage) -> tuple[int, int]:
        """Where its file is, which a shard has once: (shard, byte)."""
        *_, offset, _ = self._images[image.shard].index[image.number].item()
        return image.shard, offset

    def image_file(self, image: ShownImage) -> bytes:
        """As it came.

        Raises:
          ShardlmError: it is not what was written."""
        images = self._images[image.shard]
        *_, written, offset, length = images.index[image.number].item()
        file = images.files[offset : offset + length].tobytes()
        if (found := zlib.crc32(file)) != written:
            path = self._paths[image.shard][0].with_suffix(FILES_SUFFIX)
            raise _damaged(
                path, f"the checksum of image {image.number} is {found:08x}, it was written as {written:08x}"
            )
        return file

    def where(self, image: ShownImage) -> str:
        """The files that it is in and its document, counted from 0 in them."""
        local = image.first - self._begins[image.shard]
        document = int(np.searchsorted(self._offsets[image.shard], local, "right")) - 1
        return f"{self._paths[image.shard][0]}, document {document}"

    def verify(self) -> None:
        """Reads everything and compares checksums, at the speed of the disk.

        Raises:
          ShardlmError: a file is not what was written.
        """
        for shard, paths, *arrays in zip(self._shards, self._paths, self._tokens, self._offsets, strict=True):
            checks = [*zip(paths, arrays, (shard.tokens_crc32, shard.offsets_crc32), strict=True)]
            if shard.scored_crc32 is not None:
                scored = self._scored[self._shards.index(shard)]
                checks.append((paths[0].with_suffix(".scored"), scored, shard.scored_crc32))
            if (images := self._images[self._shards.index(shard)]) is not None:
                checks.append((paths[0].with_suffix(INDEX_SUFFIX), images.index, shard.images.index_crc32))
            for path, array, written in checks:
                found, data = 0, array.view(np.uint8)
                for at in range(0, len(data), _VERIFY_BYTES):
                    found = zlib.crc32(data[at : at + _VERIFY_BYTES], found)
                if found != written:
                    raise _damaged(path, f"its checksum is {found:08x}, it was written as {written:08x}")
        for image in self.images(0, self.num_tokens):
            self.takes(image), self.image_file(image)

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first, end) with local token positions, for each shard that [start, stop) touches."""
        shard = bisect.bisect_right(self._begins, start) - 1
        while start < stop:
            begin, end = self._begins[shard], self._begins[shard + 1]
            yield shard, start - begin, min(stop, end) - begin
            start, shard = end, shard + 1


def _damaged(path: Path, what: str) -> ShardlmError:
    return ShardlmError(f"{path} is damaged: {what}. Remove {path.parent} and tokenise again, or copy it again")


def _read_meta(directory: Path) -> Meta:
    if not is_shards(directory):
        raise ShardlmError(f"no token shards in {directory}: make them with python -m launch.tokenize")
    path = directory / META
    if not path.is_file():
        raise ShardlmError(
            f"the token shards in {directory} are unfinished: there is no {META}, so tokenising was"
            " interrupted. Run it again"
        )
    try:
        meta = msgspec.json.decode(path.read_bytes(), type=Meta)
    except msgspec.DecodeError as error:
        raise _damaged(path, str(error)) from error
    if meta.format not in (FORMAT, FORMAT_WITH_IMAGES):
        known = f"{FORMAT} and {FORMAT_WITH_IMAGES}"
        raise ShardlmError(f"{path} has format {meta.format}, this version reads {known}: tokenise again")
    totals = (sum(s.num_tokens for s in meta.shards), sum(s.num_documents for s in meta.shards))
    if totals != (meta.num_tokens, meta.num_documents) or not meta.num_tokens:
        raise _damaged(path, f"its shards hold {totals}, it says {(meta.num_tokens, meta.num_documents)}")
    return meta


class _Images(NamedTuple):
    """Of one shard. first: int64 [images], in memory, as places are looked for in it."""

    first: np.ndarray
    index: np.ndarray
    files: np.ndarray

    @classmethod
    def open(cls, path: Path, shard: ShardMeta) -> "_Images | None":
        if (meta := shard.images) is msgspec.UNSET:
            return None
        file = path.with_suffix(INDEX_SUFFIX)
        index = _map(file, INDEX, meta.num_images)
        files = _map(path.with_suffix(FILES_SUFFIX), np.dtype(np.uint8), meta.num_bytes)
        first, end = index["first"].copy(), index["end"]
        ordered = (first >= 0).all() and (first < end).all() and (end[:-1] <= first[1:]).all()
        inside = (index["offset"] >= 0) & (index["length"] > 0) & (index["offset"] + index["length"] <= meta.num_bytes)
        if not (ordered and end[-1] <= shard.num_tokens and inside.all()):
            raise _damaged(file, f"its images are not in order within {shard.num_tokens} tokens and their files")
        return cls(first, index, files)


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """The file as a read-only array of the length expected."""
    expected = length * dtype.itemsize
    if not path.is_file():
        raise _damaged(path, "the file is missing")
    if (size := path.stat().st_size) != expected:
        raise _damaged(path, f"it has {size} bytes, expected {expected}")
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _map_offsets(path: Path, shard: ShardMeta) -> np.ndarray:
    offsets = _map(path, np.dtype(np.int64), shard.num_documents + 1)
    if offsets[0] != 0 or offsets[-1] != shard.num_tokens or (np.diff(offsets) <= 0).any():
        raise _damaged(path, f"its document offsets do not ascend from 0 to {shard.num_tokens}")
    return offsets
