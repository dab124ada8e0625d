import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_documents import documents_of

from shardlm.data.packing import PADDING_ROW, best_fit_decreasing, make_rows
from shardlm.errors import ShardlmError

lengths_of_documents = st.lists(st.integers(1, 25), min_size=1, max_size=15)


def all_rows(shards, seq_len, packing):
    rows = make_rows(shards, seq_len, packing)
    return rows, rows.read(range(len(rows)))


def segments(batch, row):
    """(inputs, targets, loss mask) of each segment of a row."""
    for segment in range(1, batch["segment_ids"][row].max(initial=0) + 1):
        at = batch["segment_ids"][row] == segment
        yield batch["tokens"][row][at], batch["targets"][row][at], batch["loss_mask"][row][at]


def check_layout(batch):
    """Segments number from 1, positions count from 0 in each; padding comes last and is zeros."""
    for ids, positions in zip(batch["segment_ids"], batch["positions"], strict=True):
        filled = np.count_nonzero(ids)
        assert (ids[:filled] > 0).all() and (np.diff(ids[:filled], prepend=0) <= 1).all()
        assert (np.diff(ids[:filled], prepend=0) >= 0).all()
        for segment in range(1, ids.max(initial=0) + 1):
            np.testing.assert_array_equal(positions[ids == segment], np.arange((ids == segment).sum()))
    padding = batch["segment_ids"] == 0
    assert not any(array[padding].any() for array in batch.values())
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "segment_ids": "int32",
        "positions": "int32",
        "loss_mask": "float32",
    }


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 30), shard_tokens=st.integers(1, 60))
def test_cut_rows_are_the_stream_once(make_shards, lengths, seq_len, shard_tokens):
    documents = documents_of(lengths)
    stream = np.concatenate(documents)
    rows, batch = all_rows(make_shards(documents, shard_tokens), seq_len, "cut")
    check_layout(batch)
    real = batch["segment_ids"] > 0
    np.testing.assert_array_equal(batch["tokens"][real], stream[:-1])
    np.testing.assert_array_equal(batch["targets"][real], stream[1:])
    # Scored: all targets but the first token of each document, of which the very first is no target anyway.
    first = np.zeros(len(stream), bool)
    first[np.cumsum([0, *lengths[:-1]])] = True
    np.testing.assert_array_equal(batch["loss_mask"][real], ~first[1:])
    # A segment never holds tokens of two documents, and a document never more than one segment of a row.
    document = np.repeat(np.arange(len(lengths)), lengths)[:-1]
    row = np.nonzero(real)[0]
    same_document = (np.diff(document) == 0) & (np.diff(row) == 0)
    np.testing.assert_array_equal(same_document, (np.diff(batch["segment_ids"][real]) == 0) & (np.diff(row) == 0))
    assert real[:-1].all() and rows.padding_fraction == pytest.approx(1 - real.mean() if real.size else 1)


@settings(deadline=None, max_examples=60)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 30))
def test_whole_rows_hold_every_document_once_and_cut_only_long_ones(make_shards, lengths, seq_len):
    documents = documents_of(lengths)
    rows, batch = all_rows(make_shards(documents), seq_len, "whole")
    check_layout(batch)
    np.testing.assert_array_equal(batch["loss_mask"], batch["segment_ids"] > 0)
    expected = []
    for document in documents:
        for at in range(0, len(document) - 1, seq_len):
            piece = document[at : at + seq_len + 1]
            expected.append((tuple(piece[:-1]), tuple(piece[1:])))
    found = [
        (tuple(inputs.tolist()), tuple(targets.tolist()))
        for row in range(len(rows))
        for inputs, targets, _ in segments(batch, row)
    ]
    assert sorted(found) == sorted(expected)
    if len(rows):
        assert rows.padding_fraction == pytest.approx((batch["segment_ids"] == 0).mean())


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 50))
def test_best_fit_decreasing_equals_its_definition(lengths, capacity):
    rows = best_fit_decreasing(np.array(lengths), capacity)
    room = []
    for length in sorted(lengths, reverse=True):
        fits = [r for r in room if r >= length]
        if fits:
            room[room.index(min(fits))] -= length
        else:
            room.append(capacity - length)
    used = np.bincount(rows, lengths)
    assert sorted(capacity - used) == sorted(room)


def test_packing_many_documents_is_quick_and_tight():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.8, 1, 500_000).astype(int), 1, 2048)
    rows = best_fit_decreasing(lengths, 2048)
    used = np.bincount(rows, lengths)
    assert used.max() <= 2048 and used.mean() / 2048 > 0.999


def test_windows_of_packing_do_not_mix(make_shards, monkeypatch):
    monkeypatch.setattr("shardlm.data.packing._WINDOW", 4)
    rows, batch = all_rows(make_shards(documents_of([6] * 10)), 10, "whole")
    assert batch["segment_ids"].max(axis=1).tolist() == [2, 2, 2, 2, 2] and rows.padding_fraction == 0


def test_padding_rows_are_zeros(make_shards):
    for packing in ("cut", "whole"):
        batch = make_rows(make_shards(documents_of([9, 9])), 4, packing).read([PADDING_ROW, 0])
        assert not any(array[0].any() for array in batch.values()) and batch["loss_mask"][1].any()


def test_a_document_at_the_row_edge_starts_again_at_position_zero(make_shards):
    _, batch = all_rows(make_shards([[1, 2, 3, 4, 5, 0], [6, 7, 0]]), 4, "cut")
    assert batch["tokens"].tolist() == [[1, 2, 3, 4], [5, 0, 6, 7]]
    assert batch["targets"].tolist() == [[2, 3, 4, 5], [0, 6, 7, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2]]
    assert batch["loss_mask"].tolist() == [[1, 1, 1, 1], [1, 0, 1, 1]]


def test_unknown_packing_and_empty_rows_are_refused(make_shards):
    shards = make_shards(documents_of([5]))
    with pytest.raises(ShardlmError, match="unknown packing 'tight': it is one of cut, whole"):
        make_rows(shards, 4, "tight")
    with pytest.raises(ShardlmError, match="seq_len is 0"):
        make_rows(shards, 0, "cut")
