"""Documents out of text, JSONL and Parquet files, and out of the Python standard library.

Owns finding the files, their formats, and what happens to a document that is not UTF-8. Leaves tokenising
to `writer`. Files ending in .gz, .zst, .bz2 or .lz4 are decompressed as they are read.
"""

import dataclasses
import glob
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from shardlm.data import standard_library
from shardlm.data.config import OnBadUtf8
from shardlm.errors import ShardlmError

# (what is being done, bytes of input done, bytes of input in all)
Progress = Callable[[str, int, int], None]

_TEXT = (
    ".txt .text .md .rst .tex .html .htm .xml .py .pyi .ipynb .c .h .cc .cpp .cxx .hpp .cu .cuh .java .js .jsx"
    " .ts .tsx .go .rs .rb .php .sh .sql .toml .yaml .yml .css .jl .scala .swift .kt .lua .r .pl .hs .ml .cs"
).split()
_KINDS = {suffix: "text" for suffix in _TEXT} | {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_COMPRESSED = {".gz", ".zst", ".bz2", ".lz4"}
_FORMATS = "text (.txt, .md, .py and the like), .jsonl and .parquet"
_PARQUET_ROWS = 256  # rows decoded at a time


class Document(NamedTuple):
    """One text. `size` is the bytes of its file that it accounts for: over a corpus they sum to the files'."""

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
    """Every document of `sources` (or of the path given), in order.

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
    bare = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return _KINDS.get(bare.suffix.lower())


def _decode(data: bytes, where: str, on_bad_utf8: OnBadUtf8) -> tuple[str | None, bool]:
    """(text or None where skipped, whether it was not UTF-8)."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff"), False
    except UnicodeDecodeError as error:
        if on_bad_utf8 == "skip":
            return None, True
        if on_bad_utf8 == "replace":
            return data.decode("utf-8", errors="replace").removeprefix("\ufeff"), True
        line = data.count(b"\n", 0, error.start) + 1
        raise ShardlmError(
            f"{where}: not UTF-8: byte 0x{data[error.start]:02x} at byte offset {error.start} (line {line} of the"
            " document). Convert the file (iconv -f latin1 -t utf-8), or set on_bad_utf8=replace to put U+FFFD"
            " there, or on_bad_utf8=skip to leave such documents out"
        ) from error


def _read_text(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    with _open(source.path) as (file, _):
        yield Document(*_sized(_decode(file.read(), str(source.path), on_bad_utf8), source.size))


def _read_jsonl(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    line_type = msgspec.defstruct("Line", [("text", str, msgspec.field(name=text_key))])
    decoder = msgspec.json.Decoder(line_type)
    done = 0
    with _open(source.path) as (file, position):
        for number, line in enumerate(file, start=1):
            where = f"{source.path}:{number}"
            size, done = position() - done, position()
            text, bad = _decode(line, where, on_bad_utf8)
            if text is not None and not text.strip():
                continue
            try:
                yield Document(text and decoder.decode(text).text, size, bad)
            except msgspec.DecodeError as error:
                raise ShardlmError(f"{where}: {_json_problem(text, text_key, error)}") from error


def _json_problem(line: str, text_key: str, error: Exception) -> str:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError:
        return f"not JSON ({error}): a .jsonl file holds one JSON object a line"
    if not isinstance(value, dict):
        return f"expected a JSON object with the key {text_key!r}, got {type(value).__name__}"
    if text_key not in value:
        return f"no key {text_key!r}; the keys are {', '.join(map(repr, value)) or 'none'}. Set text_key to one of them"
    return f"the value of {text_key!r} is {type(value[text_key]).__name__}, expected a string"


def _read_parquet(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(source.path) as file:
            yield from _parquet_rows(file, source, text_key, on_bad_utf8)
    except pa.ArrowException as error:
        raise ShardlmError(f"{source.path}: not a readable Parquet file: {error}") from error


def _parquet_rows(file, source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    import pyarrow as pa

    if text_key not in file.schema_arrow.names:
        columns = ", ".join(map(repr, file.schema_arrow.names))
        raise ShardlmError(f"{source.path}: no column {text_key!r}; the columns are {columns}. Set text_key to one")
    rows, total, row = file.metadata.num_rows, source.size, 0
    for batch in file.iter_batches(_PARQUET_ROWS, columns=[text_key]):
        column = batch.column(0)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            raise ShardlmError(f"{source.path}: column {text_key!r} is {column.type}, expected strings")
        for value in column.cast(pa.large_binary()).to_pylist():
            where = f"{source.path}: row {row}"
            if value is None:
                raise ShardlmError(f"{where}: {text_key!r} is null, expected a string: filter such rows out")
            size = (row + 1) * total // rows - row * total // rows
            row += 1
            yield Document(*_sized(_decode(value, where, on_bad_utf8), size))


def _read_stdlib(source: Source, text_key: str, on_bad_utf8: OnBadUtf8) -> Iterator[Document]:
    yield Document(standard_library.decode(source.path.read_bytes()), source.size)


def _sized(decoded: tuple[str | None, bool], size: int) -> tuple[str | None, int, bool]:
    text, bad = decoded
    return text, size, bad


class _open:  # noqa: N801
    pass


_READERS = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet, "stdlib": _read_stdlib}
