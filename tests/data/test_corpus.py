import gzip
import json
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardlm.data import standard_library
from shardlm.data.corpus import find_sources, read_documents
from shardlm.errors import ShardlmError


def texts(path, **options) -> list[str | None]:
    return [document.text for document in read_documents(str(path), **options)]


def write_jsonl(path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_file_is_one_document_byte_for_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n é".encode())
    assert texts(tmp_path / "a.txt") == ["one\r\ntwo\n é"]


def test_jsonl_reads_the_key_and_skips_blank_lines(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one", "n": [1]}, {"text": "b\nc ☃"}])
    path.write_text(path.read_text() + "\n\n")
    assert texts(path) == ["one", "b\nc ☃"]
    assert texts(write_jsonl(tmp_path / "b.jsonl", [{"my body": "x"}]), text_key="my body") == ["x"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_reads_the_column_over_row_groups(tmp_path, kind):
    rows = [f"row {i} é" for i in range(1000)]
    table = pa.table({"id": list(range(1000)), "body": pa.array(rows).cast(kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    assert texts(tmp_path / "a.parquet", text_key="body") == rows


def test_compressed_files_are_read(tmp_path):
    lines = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(1000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    with pa.output_stream(str(tmp_path / "b.jsonl.zst"), compression="zstd") as file:
        file.write(lines)
    assert texts(tmp_path / "a.jsonl.gz") == texts(tmp_path / "b.jsonl.zst") == [f"document {i}" for i in range(1000)]


def test_directories_and_globs_are_read_in_order(tmp_path):
    for name in ("b/2.txt", "a/1.py", "c.md", ".git/x.txt", "a/__pycache__/y.py", "picture.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/1.py", "b/2.txt", "c.md"]
    assert texts(tmp_path / "**" / "*.txt") == ["b/2.txt"]
    assert texts(tmp_path / "?") == ["a/1.py", "b/2.txt"]
    assert [s.path.name for s in find_sources([str(tmp_path / "c.md"), str(tmp_path / "a")])] == [
        "c.md",
        "1.py",
    ]


def test_sizes_sum_to_the_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * i} for i in range(100)])
    (tmp_path / "b.txt").write_text("hello")
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), tmp_path / "c.parquet")
    sources = find_sources(str(tmp_path))
    assert sum(d.size for d in read_documents(sources)) == sum(s.size for s in sources)


def test_the_standard_library_splits_in_two():
    train, validation = (standard_library.files(name) for name in standard_library.NAMES)
    assert not set(train) & set(validation)
    assert train == sorted(train) and train == standard_library.files("stdlib:train")
    assert 0.01 < len(validation) / len(train) < 0.12
    root = Path(sysconfig.get_path("stdlib"))
    parts = {part for path in train + validation for part in path.relative_to(root).parts}
    assert {"argparse.py", "json", "asyncio"} <= parts
    assert not {"site-packages", "test", "tests", "__pycache__", "encodings"} & parts
    assert sum(len(text or "") for text in texts("stdlib:train")) > 3_000_000


def test_standard_library_text_honours_declared_encodings():
    assert standard_library.decode("# -*- coding: latin-1 -*-\n'é'\r\n".encode("latin-1")) == (
        "# -*- coding: latin-1 -*-\n'é'\n"
    )
    assert standard_library.decode(b"'\xff'") is None
    assert standard_library.decode(b"# -*- coding: nonsense -*-") is None


def test_the_standard_library_is_written_as_two_files_once(tmp_path):
    train, validation = standard_library.materialise(tmp_path)
    assert (train.name, validation.name) == ("train.jsonl", "validation.jsonl")
    assert texts(validation) == [text for text in texts("stdlib:validation") if text is not None]
    before = train.stat().st_mtime_ns
    standard_library.materialise(tmp_path)
    assert train.stat().st_mtime_ns == before
    train.write_text("half")
    standard_library.materialise(tmp_path)
    assert train.stat().st_size > 3_000_000


# What is wrong with the data is told with its place and what to do.


def test_nothing_there_is_refused(tmp_path):
    with pytest.raises(ShardlmError, match=r"no dataset at '.*nope\.txt': no such file.*stdlib:train"):
        find_sources(str(tmp_path / "nope.txt"))
    with pytest.raises(ShardlmError, match=r"no dataset at '.*\*\.jsonl'"):
        find_sources(str(tmp_path / "*.jsonl"))


def test_an_unknown_builtin_source_is_refused():
    with pytest.raises(ShardlmError, match=r"unknown text source 'stdlib:test'.*stdlib:train and stdlib:validation"):
        find_sources("stdlib:test")


def test_unsupported_formats_are_refused(tmp_path):
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(ShardlmError, match=r"a.docx: unsupported format '.docx': supported are text .*jsonl.*parquet"):
        find_sources(str(tmp_path / "a.docx"))
    with pytest.raises(ShardlmError, match=r"no text under the directory .*: it holds .docx; supported are"):
        find_sources(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n'])
def test_an_empty_dataset_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ShardlmError, match=r"the dataset .*is empty"):
        texts(tmp_path / "a.jsonl")


def bad_utf8(tmp_path, kind) -> tuple[Path, str]:
    """A file with one document that is not UTF-8 between two that are, and how its place is told."""
    if kind == "txt":
        for name, data in (("a", b"good"), ("b", b"one\ntwo \xe9t\xe9"), ("c", b"fine")):
            (tmp_path / f"{name}.txt").write_bytes(data)
        return tmp_path, r"b\.txt: not UTF-8: byte 0xe9 at byte offset 8, line 2"
    if kind == "jsonl":
        (tmp_path / "a.jsonl").write_bytes(b'{"text":"good"}\n{"text":"\xe9t\xe9"}\n{"text":"fine"}\n')
        return tmp_path / "a.jsonl", r"a\.jsonl:2: not UTF-8: byte 0xe9 at byte offset 9"
    column = pa.array([b"good", b"\xe9t\xe9", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet", r"a\.parquet: row 1: not UTF-8: byte 0xe9 at byte offset 0"


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_documents_that_are_not_utf8(tmp_path, kind):
    path, place = bad_utf8(tmp_path, kind)
    with pytest.raises(ShardlmError, match=place + ".*iconv.*on_bad_utf8=replace.*on_bad_utf8=skip"):
        texts(path)
    replaced = list(read_documents(str(path), on_bad_utf8="replace"))
    assert [d.bad_utf8 for d in replaced] == [False, True, False]
    assert "\ufffdt\ufffd" in replaced[1].text
    skipped = list(read_documents(str(path), on_bad_utf8="skip"))
    assert [d.text for d in skipped] == ["good", None, "fine"] and skipped[1].bad_utf8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r":2: not JSON"),
        ('{"text": "\\ud83d x"}', r":2: not JSON"),
        ('["a"]', r":2: expected a JSON object with the key 'text', got list"),
        ('{"body": "a", "id": 1}', r":2: no key 'text'; the keys are 'body', 'id'. Set text_key"),
        ('{"messages": []}', r":2: no key 'text'; the keys are 'messages'. Chats need data.chat_template"),
        ('{"text": null}', r":2: the value of 'text' is NoneType, expected a string"),
    ],
)
def test_bad_lines_are_refused(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ShardlmError, match=r"a\.jsonl" + message):
        texts(tmp_path / "a.jsonl")


def test_bad_parquet_is_refused(tmp_path):
    pq.write_table(pa.table({"id": [1], "body": ["x"], "none": pa.array([None], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ShardlmError, match=r"a.parquet: no column 'text'; the columns are 'id', 'body', 'none'"):
        texts(tmp_path / "a.parquet")
    with pytest.raises(ShardlmError, match=r"column 'id' holds int64, expected strings"):
        texts(tmp_path / "a.parquet", text_key="id")
    with pytest.raises(ShardlmError, match=r"row 0: 'none' is null"):
        texts(tmp_path / "a.parquet", text_key="none")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ShardlmError, match=r"b.parquet: not a readable Parquet file"):
        texts(tmp_path / "b.parquet")


def test_a_damaged_archive_is_refused(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(ShardlmError, match=r"cannot read .*a.jsonl.gz"):
        texts(tmp_path / "a.jsonl.gz")
