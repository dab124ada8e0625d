"""Tokenises documents into shards, in parallel.

Owns the order of work (the output does not depend on the number of workers), the parts that very long
documents are encoded in, and leaving nothing half-usable behind. The format is `shards`'s.
"""

import collections
import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from shardlm.data.corpus import Document
from shardlm.data.shards import FORMAT, FORMAT_WITH_IMAGES, META, Meta, ShardMeta, TokenShards, token_dtype
from shardlm.data.stored_images import DocumentImage, ImageFiles
from shardlm.errors import ShardlmError
from shardlm.files import free_space, write_atomically
from shardlm.tokenizer import Tokenizer

SHARD_TOKENS = 1 << 28
TOKENIZER = "tokenizer.json"
_OURS = re.compile(r"\d{5}\.(tokens|offsets|scored|images|files)|tokenizer\.json|\.(meta|tokenizer)\.json\.\d+\.tmp")
# Longer documents are encoded in parts, cut after a line end: encoding takes about 200 bytes of memory a
# character (2.6 GB for one of 12 MB).
_PART_CHARS = 1 << 20
_TASK_CHARS = 1 << 20


class _Part(NamedTuple):
    text: str
    ends_document: bool


class _Task(NamedTuple):
    parts: list[_Part]
    size: int  # bytes on disk that it accounts for
    num_bad_utf8: int


class _Encoded(NamedTuple):
    tokens: np.ndarray
    ends: np.ndarray  # int64: position after each document's last token
    num_bytes: int


def write_shards(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    directory: str | os.PathLike,
    *,
    num_workers: int = 0,
    shard_tokens: int = SHARD_TOKENS,
    progress: Callable[[int], None] = lambda done: None,
) -> TokenShards:
    """Tokenises `documents` into `directory`, beside a copy of the tokenizer. Empty ones are left out.

    Args:
      num_workers: processes that tokenise; 0 does it in this one, on the tokenizer's own threads. Scripts
        that ask for processes need the usual `if __name__ == "__main__":`.
      shard_tokens: a shard ends with the first document after this many tokens.
      progress: called with the bytes of input done so far.

    Raises:
      ShardlmError: `directory` holds finished shards, the disk is full, no document has text, the tokenizer
        has no end-of-document token, or a worker died. Nothing is left in `directory` then.
    """
    directory, done, num_bad_utf8 = Path(directory), 0, 0
    _ = tokenizer.end_of_document_id  # refuse before work begins
    with ShardWriter(directory, tokenizer, shard_tokens) as writer:
        with contextlib.closing(_encode_all(_tasks(documents), tokenizer, num_workers)) as work:
            for task, encoded in work:
                writer.add(encoded.tokens, encoded.ends, encoded.num_bytes)
                num_bad_utf8 += task.num_bad_utf8
                done += task.size
                progress(done)
        writer.finish(num_bad_utf8)
    return TokenShards.open(directory)


def check_output(directory: str | os.PathLike) -> None:
    """Passes where shards may be written: nothing there, an empty directory, or unfinished shards.

    Raises:
      ShardlmError: finished shards or other files are there; writing would remove what is in its way.
    """
    there = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    if META in there:
        raise ShardlmError(
            f"{directory} already holds finished token shards: choose another output, or remove it first"
        )
    foreign = [name for name in there if not _OURS.fullmatch(name)]
    if foreign or there == [TOKENIZER]:
        raise ShardlmError(
            f"{directory} holds other files ({', '.join((foreign or there)[:5])}): shards need an empty"
            " directory of their own"
        )


class ShardWriter:
    """Writes tokens that exist already. Leaving the `with` block without `finish` removes the files. `image_token`: the
    one that stands for each vector of an image, where there are some."""

    def __init__(
        self, directory: Path, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS, image_token: int | None = None
    ):
        self._directory, self._tokenizer, self._shard_tokens = directory, tokenizer, shard_tokens
        self._image_token, self._images = image_token, None  # ImageFiles of this shard
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._shards: list[ShardMeta] = []
        self._num_bytes = 0
        self._file = None
        self._finished = False

    def __enter__(self) -> "ShardWriter":
        with self._clear_errors():
            check_output(self._directory)
            self._directory.mkdir(parents=True, exist_ok=True)
            self._remove()
        return self

    def __exit__(self, *exception) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk fails again when the buffer is flushed
                self._file.close()
        if self._images is not None:
            with contextlib.suppress(OSError):
                self._images.close()
        if not self._finished:
            self._remove()

    def add(
        self,
        tokens: np.ndarray,
        ends: np.ndarray,
        num_bytes: int,
        scored: np.ndarray | None = None,
        images: Sequence[DocumentImage] = (),
    ) -> None:
        """Appends tokens; `ends` are the positions in them after each document's last token, `scored` bool says which
        are learned: given always, or never. `images` in the order of their tokens, which are counted from the first of
        `tokens`."""
        with self._clear_errors():
            if self._file is None:
                self._begin()
            data = tokens.astype(self._dtype, copy=False)
            self._file.write(data.data)
            self._crc = zlib.crc32(data.data, self._crc)
            if scored is not None:
                self._scored.append(scored.astype(np.uint8))
            if images:
                if self._images is None:
                    self._images = ImageFiles(self._directory, self._name)
                self._images.add(images, self._length)
            self._ends.append(ends + self._length)
            self._length += len(tokens)
            self._num_bytes += num_bytes
            if self._length >= self._shard_tokens and len(ends) and ends[-1] == len(tokens):
                self._end()

    def finish(self, num_bad_utf8: int = 0) -> None:
        """Writes meta.json, which makes the directory usable."""
        with self._clear_errors():
            if self._file is not None:
                self._end()
            if not self._shards:
                raise ShardlmError(f"nothing to write to {self._directory}: no document has text")
            seen = any(shard.images is not msgspec.UNSET for shard in self._shards)
            meta = Meta(
                format=FORMAT_WITH_IMAGES if seen else FORMAT,
                dtype=self._dtype.name,
                vocab_size=self._tokenizer.vocab_size,
                tokenizer=self._tokenizer.fingerprint,
                num_tokens=sum(shard.num_tokens for shard in self._shards),
                num_documents=sum(shard.num_documents for shard in self._shards),
                num_bytes=self._num_bytes,
                num_bad_utf8=num_bad_utf8,
                shards=tuple(self._shards),
                image_token=self._image_token if seen else msgspec.UNSET,
            )
            self._tokenizer.save(self._directory / TOKENIZER)
            write_atomically(self._directory / META, msgspec.json.format(msgspec.json.encode(meta)) + b"\n")
        self._finished = True

    def _begin(self) -> None:
        self._name = f"{len(self._shards):05d}"
        self._file = open(self._directory / f"{self._name}.tokens", "wb")  # noqa: SIM115
        self._crc = self._length = 0
        self._ends: list[np.ndarray] = []
        self._scored: list[np.ndarray] = []

    def _end(self) -> None:
        self._file.close()
        self._file = None
        offsets = np.concatenate([np.zeros(1, np.int64), *self._ends])
        (self._directory / f"{self._name}.offsets").write_bytes(offsets.data)
        scored_crc32 = None
        if self._scored:
            scored = np.concatenate(self._scored)
            (self._directory / f"{self._name}.scored").write_bytes(scored.data)
            scored_crc32 = zlib.crc32(scored.data)
        images = msgspec.UNSET if self._images is None else self._images.finish()
        self._images = None
        crcs = (self._crc, zlib.crc32(offsets.data), scored_crc32)
        self._shards.append(ShardMeta(self._name, self._length, len(offsets) - 1, *crcs, images))

    def _remove(self) -> None:
        for path in self._directory.iterdir():
            if _OURS.fullmatch(path.name):
                path.unlink()

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ShardlmError(
                f"cannot write token shards to {self._directory}: {error.strerror or error}"
                f" ({free_space(self._directory)}). What was written is removed. A token takes"
                f" {self._dtype.itemsize} bytes, all of them about half the size of the text, and images their files:"
                " free space or choose another directory"
            ) from error


def _tasks(documents: Iterable[Document]) -> Iterator[_Task]:
    """Documents in tasks of about equal length; a document longer than one is cut into parts."""
    parts, size, bad, chars = [], 0, 0, 0
    for document in documents:
        size += document.size
        bad += document.bad_utf8
        for part in _cut(document.text or ""):
            parts.append(part)
            chars += len(part.text)
            if chars >= _TASK_CHARS:
                yield _Task(parts, size, bad)
                parts, size, bad, chars = [], 0, 0, 0
    if parts or size:
        yield _Task(parts, size, bad)


def _cut(text: str) -> Iterator[_Part]:
    at = 0
    while at < len(text):
        end = at + _PART_CHARS
        if end < len(text):
            end = text.rfind("\n", at, end) + 1 or end
        yield _Part(text[at:end], end >= len(text))
        at = end


def _encode(task: _Task, tokenizer: Tokenizer) -> _Encoded:
    ids = tokenizer.encode_batch([part.text for part in task.parts], parse_special=False)
    end = [tokenizer.end_of_document_id]
    pieces = [one + end if part.ends_document else one for one, part in zip(ids, task.parts, strict=True)]
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    return _Encoded(
        np.array(list(itertools.chain.from_iterable(pieces)), token_dtype(tokenizer.vocab_size)),
        ends[np.array([part.ends_document for part in task.parts], bool)],
        sum(len(part.text.encode()) for part in task.parts),
    )


def _encode_all(tasks: Iterator[_Task], tokenizer: Tokenizer, num_workers: int) -> Iterator[tuple[_Task, _Encoded]]:
    """Every task with its tokens, in order."""
    if num_workers == 0:
        yield from ((task, _encode(task, tokenizer)) for task in tasks)
        return
    with tempfile.TemporaryDirectory(prefix="shardlm-") as directory:
        path = str(Path(directory) / TOKENIZER)
        tokenizer.save(path)
        yield from _encode_in_processes(tasks, path, num_workers)


def _encode_in_processes(
    tasks: Iterator[_Task], tokenizer_path: str, num_workers: int
) -> Iterator[tuple[_Task, _Encoded]]:
    """At most 2 * num_workers + 1 tasks are in memory."""
    context = multiprocessing.get_context("spawn")  # forking a process that has threads may deadlock
    waiting: collections.deque = collections.deque()
    with futures.ProcessPoolExecutor(num_workers, context, _start_worker) as pool:
        try:
            for task in tasks:
                waiting.append((task, pool.submit(_encode_in_worker, task, tokenizer_path)))
                if len(waiting) > 2 * num_workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        except BrokenProcessPool as error:
            raise ShardlmError(
                "a tokenising process died, most likely for lack of memory: use fewer --num_workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_load_once = functools.cache(Tokenizer.load)  # in a worker, which sees one tokenizer in its life


def _encode_in_worker(task: _Task, tokenizer_path: str) -> _Encoded:
    return _encode(task, _load_once(tokenizer_path))


def _start_worker() -> None:
    """Ctrl-C is the parent's to handle; a worker ends when the parent does, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
