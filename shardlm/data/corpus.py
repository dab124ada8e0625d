"""Documents out of text, JSONL and Parquet files, and out of the Python standard library.

Owns finding the files, their formats, and what happens to a document that is not UTF-8. Leaves tokenising
to `writer`. Files ending in .gz, .zst, .bz2 or .lz4 are decompressed as they are read.
"""

import contextlib
import dataclasses
import glob
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import msgspec

from shardlm.data import standard_library
from shardlm.data.config import OnBadUtf8
from shardlm.errors import ShardlmError

# (what is being done, bytes of input done, bytes of input in all)
Progress = Callable[[str, int, int], None]

_TEXT = """
    .txt .text .md .rst .tex .html .htm .xml .css .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .cu .cuh .cs .java
    .js .jsx .ts .tsx .go .rs .rb .php .sh .sql .toml .yaml .yml .jl .scala .swift .kt .lua .r .pl .hs .ml
"""
_KINDS = dict.fromkeys(re.findall(r"\S+", _TEXT), "text") | {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_FORMATS = "text (.txt, .md, .py and the like), .jsonl and .parquet"
_OF_CHATS = {"messages", "conversations", "completion", "chosen", "rejected"}  # keys of conversations and preferences
_PARQUET_ROWS = 256  # rows decoded at a time


class Document(NamedTuple):
    """One text. `size`: bytes on disk read for it; over a corpus these sum to about the size of the files."""

    text: str | None  # None: skipped
    size: int
    bad_utf8: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """A file of documents."""

    path: Path
    kind: Literal["text", "jsonl", "parquet", "stdlib"]

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    @property
    def identity(self) -> tuple[str, int, int]:
        """Changes when the file does, as far as its name, size and time tell."""
        status = self.path.stat()
        return str(self.path), status.st_size, status.st_mtime_ns


def find_sources(paths: str | Sequence[str]) -> tuple[Source, ...]:
    """The files that files, directories, globs and `stdlib:` names stand for, in a fixed order.

    A directory contributes every file below it in a supported format; a file or a glob must be in one.

    Raises:
      ShardlmError: nothing there, nothing in a supported format there, or an unsupported format.
    """
    found = [source for path in ([paths] if isinstance(paths, str) else paths) for source in _expand(path)]
    if found and not any(source.size for source in found):
        raise ShardlmError(f"the dataset {paths} is empty: its {len(found)} file(s) have no bytes")
    return tuple(found)


def read_documents(
    sources: Sequence[Source] | str, *, text_key: str = "text", on_bad_utf8: OnBadUtf8 = "fail"
) -> Iterator[Document]:
    """Every document of `sources` (or of the files that a path stands for), in order.

    Args:
      text_key: the JSONL key or Parquet column that holds the text.
      on_bad_utf8: what to do with a document that is not UTF-8: `fail`, `replace` each bad byte with U+FFFD,
        or `skip` the document. Replaced and skipped ones are marked `bad_utf8`.

    Raises:
      ShardlmError: a file cannot be read, a document has no text or is not UTF-8, or there is no text at all.
    """
    sources = find_sources(sources) if isinstance(sources, str) else sources
    any_text = False
    for source in sources:
        try:
            for document in _READERS[source.kind](source, text_key, on_bad_utf8):
                any_text = any_text or bool(document.text)
                yield document
        except (OSError, EOFError) as error:
            raise ShardlmError(f"cannot read {source.path}: {error}") from error
    if not any_text:
        names = ", ".join(str(source.path) for source in sources[:3])
        raise ShardlmError(f"the dataset is empty: no text in {len(sources)} file(s) ({names}...): check the paths")


def _expand(path: str) -> list[Source]:
    if path.startswith("stdlib:"):
        return [Source(file, "stdlib") for file in standard_library.files(path)]
    if os.path.isdir(path):
        below = sorted(p for p in Path(path).rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
        sources = [Source(p, kind) for p in below if (kind := _kind(p))]
        if not sources:
            endings = ", ".join(sorted({p.suffix or p.name for p in below})) or "nothing"
            raise ShardlmError(f"no text under the directory {path}: it holds {endings}; supported are {_FORMATS}")
        return sources
    matches = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
    if not matches:
        raise ShardlmError(
            f"no dataset at {path!r}: no such file or directory, and no file matches it as a pattern"
            f" (from {os.getcwd()}). Check the path, or use stdlib:train for a text that every machine has"
        )
    sources = []
    for file in (Path(match) for match in matches if os.path.isfile(match)):
        if (kind := _kind(file)) is None:
            raise ShardlmError(f"{file}: unsupported format {file.suffix!r}: supported are {_FORMATS}")
        sources.append(Source(file, kind))
    return sources or [source for match in matches for source in _expand(match)]


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _kind(path: Path) -> str | None:
    bare = path.with_suffix("") if path.suffix.lower() in _CODECS else path
    return _KINDS.get(bare.suffix.lower())


def _decode(data: bytes, where: str, size: int, on_bad_utf8: OnBadUtf8) -> Document:
    try:
        return Document(data.decode("utf-8").removeprefix("\ufeff"), size)
    except UnicodeDecodeError as error:
        if on_bad_utf8 == "skip":
            return Document(None, size, bad_utf8=True)
        if on_bad_utf8 == "replace":
            return Document(data.decode("utf-8", "replace").removeprefix("\ufeff"), size, bad_utf8=True)
        line = data.count(b"\n", 0, error.start) + 1
        raise ShardlmError(
            f"{where}: not UTF-8: byte 0x{data[error.start]:02x} at byte offset {error.start}, line {line} of"
            " the document. Convert the file (iconv -f latin1 -t utf-8), or set on_bad_utf8=replace for"
            " U+FFFD in its place, or on_bad_utf8=skip to leave such documents out"
        ) from error


@contextlib.contextmanager
def open_plain(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The decompressed file, and a function that says how far the file on disk has been read, in bytes."""
    if (codec := _CODECS.get(path.suffix.lower())) is None:
        with open(path, "rb") as file:
            yield file, file.tell
    else:
        import pyarrow as pa

        with pa.OSFile(str(path)) as raw, pa.CompressedInputStream(raw, codec) as stream:
            yield io.BufferedReader(stream), raw.tell


def _read_text(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    with open_plain(source.path) as (file, _):
        yield _decode(file.read(), str(source.path), source.size, on_bad_utf8)


def _read_stdlib(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    yield Document(standard_library.decode(source.path.read_bytes()), source.size)


def read_lines(source: Source) -> Iterator[tuple[int, bytes, int]]:
    """(number from 1, line, bytes on disk read for it) of a file's lines that are not blank."""
    done = 0
    with open_plain(source.path) as (file, position):
        for number, line in enumerate(file, start=1):
            if line.strip():
                size, done = position() - done, position()
                yield number, line, size


def _read_jsonl(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    decoder = msgspec.json.Decoder(msgspec.defstruct("Line", [("text", str, msgspec.field(name=text_key))]))
    for number, line, size in read_lines(source):
        raw = _decode(line, f"{source.path}:{number}", size, on_bad_utf8)
        try:
            yield raw if raw.text is None else raw._replace(text=decoder.decode(raw.text).text)
        except msgspec.DecodeError as error:
            problem = _json_problem(raw.text, text_key, error)
            raise ShardlmError(f"{source.path}:{number}: {problem}") from error


def _json_problem(line: str, text_key: str, error: Exception) -> str:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return f"not JSON ({error}): a .jsonl file holds one JSON object a line"
    if not isinstance(value, dict):
        return f"expected a JSON object with the key {text_key!r}, got {type(value).__name__}"
    if text_key not in value:
        return f"no key {text_key!r}; the keys are {', '.join(map(repr, value)) or 'none'}. {_remedy(value)}"
    return f"the value of {text_key!r} is {type(value[text_key]).__name__}, expected a string"


def _remedy(keys: Iterable[str]) -> str:
    """For a line or file without the key of texts."""
    if _OF_CHATS & set(keys):
        return "Chats need data.chat_template, as configs/sft.py has it, and pairs data.packing as configs/dpo.py"
    return "Set text_key to the one that holds the text"


def _read_parquet(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            size = source.size / max(1, file.metadata.num_rows)
            for row, value in enumerate(_parquet_values(file, source.path, text_key)):
                share = int((row + 1) * size) - int(row * size)
                yield _decode(value, f"{source.path}: row {row}", share, on_bad_utf8)
    except pa.ArrowException as error:
        raise ShardlmError(f"{source.path}: not a readable Parquet file: {error}") from error


def _parquet_values(file, path: Path, text_key: str) -> Iterator[bytes]:
    """The text column of a ParquetFile as bytes: the format does not enforce that strings are UTF-8."""
    import pyarrow as pa

    if text_key not in file.schema_arrow.names:
        names = file.schema_arrow.names
        columns = ", ".join(map(repr, names))
        raise ShardlmError(f"{path}: no column {text_key!r}; the columns are {columns}. {_remedy(names)}")
    row = 0
    for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_key]):
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.type not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            raise ShardlmError(f"{path}: column {text_key!r} holds {column.type}, expected strings")
        for value in column.cast(pa.large_binary()).to_pylist():
            if value is None:
                raise ShardlmError(f"{path}: row {row}: {text_key!r} is null, expected a string: filter it out")
            yield value
            row += 1


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "stdlib": _read_stdlib}
