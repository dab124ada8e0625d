import contextlib
import itertools
import resource
import signal

import pytest

from shardlm.data import writer
from shardlm.data.corpus import Document
from shardlm.data.shards import TokenShards
from shardlm.data.writer import write_shards
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer, train_bpe

TEXTS = [f"class C{i}:\n" + f"    x_{i} = {i}  # é\n" * (i % 40 + 1) for i in range(120)]
TOKENIZER = train_bpe(TEXTS, 500)


def documents(texts=TEXTS):
    return [Document(text, len(text.encode())) for text in texts]


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_every_document_is_there_with_its_end(tmp_path):
    done = []
    shards = write_shards(documents(), TOKENIZER, tmp_path / "s", progress=done.append)
    end = TOKENIZER.end_of_document_id
    offsets = shards.document_offsets()
    for text, start, stop in zip(TEXTS, offsets[:-1], offsets[1:], strict=True):
        assert shards.window(start, stop - start).tolist() == [*TOKENIZER.encode(text), end]
    assert shards.num_bytes == sum(len(text.encode()) for text in TEXTS) == done[-1]
    assert Tokenizer.load(tmp_path / "s").fingerprint == shards.tokenizer == TOKENIZER.fingerprint
    shards.verify()


def test_output_does_not_depend_on_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_TASK_CHARS", 1000)  # many tasks
    for workers in (0, 2):
        write_shards(documents(), TOKENIZER, tmp_path / str(workers), num_workers=workers, shard_tokens=1000)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")
    assert len(contents(tmp_path / "0")) > 10


def test_a_long_document_is_encoded_in_parts_and_stays_one(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_PART_CHARS", 100)
    monkeypatch.setattr(writer, "_TASK_CHARS", 150)
    texts = ["".join(TEXTS[:30]), "x" * 1000, "end"]
    shards = write_shards(documents(texts), TOKENIZER, tmp_path / "s", shard_tokens=50)
    offsets = shards.document_offsets()
    decoded = [TOKENIZER.decode(shards.window(a, b - a).tolist()) for a, b in itertools.pairwise(offsets)]
    assert decoded == texts


def test_a_document_that_spells_the_end_token_does_not_end(tmp_path):
    shards = write_shards(documents(["a<|endoftext|>b"]), TOKENIZER, tmp_path / "s")
    assert (shards.window(0, 100) == TOKENIZER.end_of_document_id).sum() == 1


def test_documents_without_text_are_left_out_and_bad_ones_counted(tmp_path):
    mixed = [
        Document("a", 1),
        Document("", 0),
        Document(None, 9, bad_utf8=True),
        Document("b\ufffd", 2, bad_utf8=True),
    ]
    shards = write_shards(mixed, TOKENIZER, tmp_path / "s")
    assert (shards.num_documents, shards.num_bad_utf8) == (2, 2)


def test_unfinished_shards_are_replaced_and_finished_ones_kept(tmp_path):
    directory = tmp_path / "s"
    write_shards(documents(), TOKENIZER, directory)
    (directory / "meta.json").unlink()  # as if it had been killed
    (directory / "00007.tokens").write_bytes(b"left over")
    write_shards(documents(TEXTS[:3]), TOKENIZER, directory)
    assert sorted(contents(directory)) == ["00000.offsets", "00000.tokens", "meta.json", "tokenizer.json"]
    with pytest.raises(ShardlmError, match="already holds finished token shards"):
        write_shards(documents(), TOKENIZER, directory)
    assert TokenShards.open(directory).num_documents == 3


@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json"])
def test_a_directory_with_other_files_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ShardlmError, match=f"holds other files \\({name}\\)"):
        write_shards(documents(), TOKENIZER, tmp_path)
    assert contents(tmp_path) == {name: b"mine"}


@contextlib.contextmanager
def files_limited_to(size):
    """Writing beyond `size` bytes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


# One shard is too large; all are small enough, but not the tokenizer beside them.
@pytest.mark.parametrize(
    ("shard_tokens", "message"),
    [
        (1 << 28, r"cannot write token shards .*free on its file system.*is removed.*free space"),
        (200, "Cannot write"),
    ],
)
def test_a_disk_that_refuses_leaves_nothing(tmp_path, shard_tokens, message, monkeypatch):
    monkeypatch.setattr(writer, "_TASK_CHARS", 1000)
    with files_limited_to(4096), pytest.raises(ShardlmError, match=message):
        write_shards(documents(), TOKENIZER, tmp_path / "s", shard_tokens=shard_tokens)
    assert contents(tmp_path / "s") == {}
    write_shards(documents(), TOKENIZER, tmp_path / "s")


def test_a_failing_source_leaves_nothing(tmp_path):
    def broken():
        yield from documents()
        raise ShardlmError("bad document")

    with pytest.raises(ShardlmError, match="bad document"):
        write_shards(broken(), TOKENIZER, tmp_path / "s", num_workers=1)
    assert contents(tmp_path / "s") == {}


def test_no_text_is_refused(tmp_path):
    with pytest.raises(ShardlmError, match="no document has text"):
        write_shards([Document("", 0)], TOKENIZER, tmp_path / "s")


def test_a_dead_worker_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_start_worker", _die)
    with pytest.raises(ShardlmError, match=r"a tokenising process died.*fewer --num_workers"):
        write_shards(documents(), TOKENIZER, tmp_path / "s", num_workers=1)


def _die():
    signal.raise_signal(signal.SIGKILL)
