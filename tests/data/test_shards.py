import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_documents import documents_of

from shardlm.data.shards import TokenShards, token_dtype
from shardlm.errors import ShardlmError


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    shard_tokens=st.integers(1, 40),
    start=st.integers(0, 150),
    length=st.integers(0, 150),
)
def test_windows_and_document_starts_do_not_see_shards(make_shards, lengths, shard_tokens, start, length):
    documents = documents_of(lengths)
    shards = make_shards(documents, shard_tokens)
    stream, starts = np.concatenate(documents), np.cumsum([0, *lengths])
    assert (shards.num_tokens, shards.num_documents) == (len(stream), len(lengths))
    assert shards.num_bytes == len(stream) - len(lengths)
    np.testing.assert_array_equal(shards.window(start, length), stream[start : start + length])
    np.testing.assert_array_equal(shards.document_offsets(), starts)
    inside = [s for s in starts[:-1] if start <= s < start + length]
    np.testing.assert_array_equal(shards.document_starts(start, start + length), inside)
    assert len(list(shards.directories[0].glob("*.tokens"))) > 1 or len(stream) < shard_tokens + 12


def test_several_directories_are_one_stream(make_shards):
    a, b = make_shards(documents_of([3, 4])), make_shards(documents_of([5]))
    both = TokenShards.open(*a.directories, *b.directories)
    np.testing.assert_array_equal(both.window(0, 12), np.concatenate([a.window(0, 7), b.window(0, 5)]))
    np.testing.assert_array_equal(both.document_offsets(), [0, 3, 7, 12])
    assert both.fingerprint not in (a.fingerprint, b.fingerprint)
    assert make_shards(documents_of([3, 4])).fingerprint == a.fingerprint


def test_the_smallest_type_that_holds_the_vocabulary():
    assert token_dtype(65_536) == np.uint16 and token_dtype(65_537) == np.uint32


def test_whole_shards_verify(make_shards):
    make_shards(documents_of([5, 9, 2]), shard_tokens=6).verify()


@pytest.fixture
def directory(make_shards):
    return make_shards(documents_of([50, 12, 30]), shard_tokens=60).directories[0]


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(ShardlmError, match=r"no token shards in .*nope: make them with python -m launch.tokenize"):
        TokenShards.open(tmp_path / "nope")


def test_unfinished_shards_are_refused(directory):
    (directory / "meta.json").unlink()
    with pytest.raises(ShardlmError, match=r"unfinished: there is no meta.json.*Run it again"):
        TokenShards.open(directory)


@pytest.mark.parametrize("content", ["{", '{"format": 1}', '{"format": "x"}'])
def test_damaged_meta_is_refused(directory, content):
    (directory / "meta.json").write_text(content)
    with pytest.raises(ShardlmError, match=r"meta.json is damaged: .*Remove .* and tokenise again"):
        TokenShards.open(directory)


def test_another_format_is_refused(directory):
    meta = (directory / "meta.json").read_text()
    (directory / "meta.json").write_text(meta.replace('"format": 1', '"format": 9'))
    with pytest.raises(ShardlmError, match=r"has format 9, this version reads 1"):
        TokenShards.open(directory)


def test_a_missing_file_is_named(directory):
    (directory / "00001.tokens").unlink()
    with pytest.raises(ShardlmError, match=r"00001.tokens is damaged: the file is missing"):
        TokenShards.open(directory)


def test_a_truncated_file_is_named(directory):
    path = directory / "00000.tokens"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ShardlmError, match=r"00000.tokens is damaged: it has 121 bytes, expected 124"):
        TokenShards.open(directory)


def test_damaged_offsets_are_named(directory):
    np.array([0, 70, 62], np.int64).tofile(directory / "00000.offsets")
    with pytest.raises(ShardlmError, match=r"00000.offsets is damaged: its document offsets do not ascend"):
        TokenShards.open(directory)


def test_a_token_outside_the_vocabulary_is_named_when_it_is_read(directory):
    tokens = np.fromfile(directory / "00001.tokens", np.uint16)
    tokens[5] = 300
    tokens.tofile(directory / "00001.tokens")
    shards = TokenShards.open(directory)
    shards.window(0, 62)
    with pytest.raises(ShardlmError, match=r"00001.tokens is damaged: token 300 between .*, vocabulary 257"):
        shards.window(55, 20)


def test_verify_finds_one_changed_byte(directory):
    data = bytearray((directory / "00001.tokens").read_bytes())
    data[8] ^= 1
    (directory / "00001.tokens").write_bytes(data)
    with pytest.raises(ShardlmError, match=r"00001.tokens is damaged: its checksum is \w+, it was written as \w+"):
        TokenShards.open(directory).verify()


def test_shards_of_different_tokenizers_are_refused(directory, make_shards):
    other = make_shards(documents_of([5])).directories[0]
    meta = (other / "meta.json").read_text()
    (other / "meta.json").write_text(meta.replace('"vocab_size": 257', '"vocab_size": 300'))
    with pytest.raises(ShardlmError, match=r"different tokenizers, of vocabulary 257 and 300"):
        TokenShards.open(directory, other)
