import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_documents import documents_of

from shardlm.data.loader import Loader, validation_batches
from shardlm.data.packing import make_rows
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError

LENGTHS = [3, 17, 40, 5, 5, 28, 9, 61, 2, 12] * 3
packings = st.sampled_from(["cut", "whole"])


@pytest.fixture(scope="module")
def shards(make_shards):
    return make_shards(documents_of(LENGTHS), shard_tokens=100)


def take(loader, count):
    return list(itertools.islice(loader, count))


def assert_same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def row_keys(batches):
    """Rows of batches as bytes that tell them apart."""
    return [row.tobytes() for batch in batches for row in batch["tokens"]]


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_every_row_comes_once_an_epoch_in_a_new_order(shards, packing):
    every = make_rows(shards, 8, packing)
    expected = sorted(row_keys([every.read(range(len(every)))]))
    loader = Loader(shards, seq_len=8, global_batch=1, seed=3, packing=packing)
    first, second = (row_keys(take(loader, len(every))) for _ in range(2))
    assert sorted(first) == sorted(second) == expected
    assert first != second and first != row_keys([every.read(range(len(every)))])
    assert loader.epoch == 2 and loader.num_rows == len(every)
    assert loader.padding_fraction == every.padding_fraction


def test_the_seed_decides(shards):
    def run(seed):
        return row_keys(take(Loader(shards, seq_len=8, global_batch=4, seed=seed), 20))

    assert run(1) == run(1) != run(2)
    # Not the neighbour's next epoch either.
    rows = Loader(shards, seq_len=8, global_batch=1, seed=1).num_rows
    second_epoch = row_keys(take(Loader(shards, seq_len=8, global_batch=1, seed=1), 2 * rows))[rows:]
    assert second_epoch != row_keys(take(Loader(shards, seq_len=8, global_batch=1, seed=2), rows))


def test_without_shuffle_rows_come_in_order(shards):
    loader = Loader(shards, seq_len=8, global_batch=5, seed=0, shuffle=False)
    np.testing.assert_array_equal(next(loader)["tokens"].ravel(), shards.window(0, 40))


def test_epochs_end(shards):
    loader = Loader(shards, seq_len=8, global_batch=7, seed=0, epochs=2)
    assert len(list(loader)) == 2 * loader.num_rows // 7


@settings(deadline=None, max_examples=15)
@given(data=st.data(), packing=packings, global_batch=st.integers(1, 9), seq_len=st.sampled_from([4, 8, 13]))
def test_any_division_over_processes_reads_the_same_batches(shards, data, packing, global_batch, seq_len):
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=global_batch, max_size=global_batch)))
    options = {"seq_len": seq_len, "global_batch": global_batch, "seed": 5, "packing": packing}
    whole = take(Loader(shards, **options), 12)
    for process in set(owner.tolist()):
        rows = np.flatnonzero(owner == process)
        part = take(Loader(shards, rows=rows.tolist(), **options), 12)
        assert_same(part, [{name: array[rows] for name, array in batch.items()} for batch in whole])


@settings(deadline=None, max_examples=15)
@given(
    stop=st.integers(0, 30),
    ahead=st.integers(0, 9),
    packing=packings,
    resumed_prefetch=st.sampled_from([0, 1, 6]),
)
def test_resuming_anywhere_continues_the_same_way(shards, stop, ahead, packing, resumed_prefetch):
    options = {"seq_len": 8, "global_batch": 4, "seed": 5, "packing": packing}
    loader = Loader(shards, **options)
    take(loader, stop)
    state = json.loads(json.dumps(loader.get_state()))
    expected = take(loader, 6)
    other = Loader(shards, prefetch=resumed_prefetch, **options)
    take(other, ahead)
    other.set_state(state)
    assert_same(take(other, 6), expected)
    # In another division over processes.
    part = Loader(shards, rows=[1, 3], **options)
    part.set_state(state)
    assert_same(take(part, 6), [{name: array[[1, 3]] for name, array in batch.items()} for batch in expected])


def test_the_state_is_the_same_in_every_process(shards):
    options = {"seq_len": 8, "global_batch": 4, "seed": 5}
    a, b = Loader(shards, rows=[0], **options), Loader(shards, rows=[1, 2, 3], **options)
    take(a, 3), take(b, 3)
    assert a.get_state() == b.get_state()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 16}, "seq_len was 8, is 16"),
        ({"global_batch": 2}, "global_batch was 4, is 2"),
        ({"seed": 6}, "seed was 5, is 6"),
        ({"packing": "whole"}, "packing was 'cut', is 'whole'"),
    ],
)
def test_a_position_in_other_data_is_refused(shards, make_shards, change, message):
    options = {"seq_len": 8, "global_batch": 4, "seed": 5}
    state = Loader(shards, **options).get_state()
    with pytest.raises(ShardlmError, match=f"does not fit this run: {message}. Restore those"):
        Loader(shards, **(options | change)).set_state(state)
    with pytest.raises(ShardlmError, match="dataset was"):
        Loader(make_shards(documents_of(LENGTHS[1:])), **options).set_state(state)


def test_a_dataset_smaller_than_a_batch_is_refused(shards):
    with pytest.raises(ShardlmError, match=r"smaller than one batch: 546 tokens make 6 rows of 100, a batch takes 7"):
        Loader(shards, seq_len=100, global_batch=7, seed=0)


@pytest.mark.parametrize("rows", [[], [1, 0], [0, 0], [4], [-1]])
def test_rows_that_are_not_of_the_batch_are_refused(shards, rows):
    with pytest.raises(ShardlmError, match="are not ascending rows of a global batch of 4"):
        Loader(shards, seq_len=8, global_batch=4, seed=0, rows=rows)
    with pytest.raises(ShardlmError, match="are not ascending rows of a global batch of 4"):
        validation_batches(shards, seq_len=8, global_batch=4, rows=rows)


@pytest.mark.parametrize("prefetch", [0, 4])
def test_damage_met_while_reading_ahead_is_told(make_shards, prefetch):
    directory = make_shards(documents_of([100])).directories[0]
    np.full(100, 999, np.uint16).tofile(directory / "00000.tokens")
    loader = Loader(TokenShards.open(directory), seq_len=8, global_batch=2, seed=0, prefetch=prefetch)
    with pytest.raises(ShardlmError, match=r"00000.tokens is damaged: token 999"):
        next(loader)


@settings(deadline=None, max_examples=20)
@given(global_batch=st.integers(1, 9), packing=packings)
def test_validation_scores_everything_once_in_equal_shapes(shards, global_batch, packing):
    options = {"seq_len": 8, "global_batch": global_batch, "packing": packing}
    batches = list(validation_batches(shards, **options))
    assert {batch["tokens"].shape for batch in batches} == {(global_batch, 8)}
    assert sum(batch["loss_mask"].sum() for batch in batches) == shards.num_tokens - shards.num_documents
    assert_same(batches, list(validation_batches(shards, **options)))
    rows = list(range(0, global_batch, 2))
    assert_same(
        list(validation_batches(shards, rows=rows, **options)),
        [{name: array[rows] for name, array in batch.items()} for batch in batches],
    )


def test_capped_validation_spreads_over_the_data(shards):
    every = row_keys(validation_batches(shards, seq_len=8, global_batch=1))
    capped = row_keys(validation_batches(shards, seq_len=8, global_batch=4, max_batches=3))
    assert len(capped) == 12
    places = [every.index(row) for row in capped]
    assert places == sorted(places) and places[-1] > 0.8 * len(every)
    assert len(list(validation_batches(shards, seq_len=8, global_batch=50, max_batches=9))) == 2
