"""Sources with weights: whose rows come when, and that all else is as without: order, processes, resuming, images."""

import collections
import dataclasses
import itertools
import json

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seen_chats import png, said, shards_of, sight

from shardlm.data.config import DataConfig, names_of
from shardlm.data.loader import Loader
from shardlm.data.mixture import Mixed, MixedRows, counted
from shardlm.data.packing import make_rows
from shardlm.data.prepare import prepare
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError

LENGTHS = {"web": [3, 17, 40, 5, 5, 28, 9, 61, 2, 12] * 6, "code": [30, 7, 30] * 6, "one": [12] * 30}
WEIGHTS = (0.6, 0.3, 0.1)


@pytest.fixture(scope="module")
def sources(make_shards):
    """Of tokens of their own: below 80, from 80 and from 160 on."""
    made = {}
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        documents = [[80 * number + 1 + i % 79 for i in range(n - 1)] + [0] for n in lengths]
        made[name] = make_shards(documents, shard_tokens=100)
    return made


def loader_of(sources, weights=WEIGHTS, **options):
    options = {"seq_len": 4, "global_batch": 10, "seed": 5} | options
    return Loader(TokenShards.join([*sources.values()]), sources=sources, weights=weights, **options)


def take(loader, count):
    return list(itertools.islice(loader, count))


def source_of(row):
    """By its tokens, of a row that may begin with an end."""
    return int(row.max()) // 80


@given(rows=st.integers(0, 10**12), parts=st.lists(st.integers(1, 1 << 32), min_size=1, max_size=6))
def test_counts_grow_row_by_row_and_keep_to_the_shares(rows, parts):
    before, after = counted(rows, parts), counted(rows + 1, parts)
    assert sum(before) == rows and sorted(b - a for a, b in zip(before, after, strict=True)) == [0] * (
        len(parts) - 1
    ) + [1]
    for n, part in zip(before, parts, strict=True):
        assert abs(n * sum(parts) - rows * part) <= len(parts) * sum(parts)


def test_the_stream_takes_each_sources_rows_in_their_order():
    mixed = Mixed([grain.MapDataset.range(0, 3).repeat(), grain.MapDataset.range(3, 10).repeat()], (1, 2), 1, None)
    first = [mixed[i] for i in range(30)]
    assert [i for i in first if i < 3] == [0, 1, 2] * 3 + [0]
    assert [i for i in first if i >= 3] == [*range(3, 10), *range(3, 10), *range(3, 9)]
    assert mixed[9 * 10**15] == mixed[0]  # far on, and no row before it is asked for


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_tokens_are_shared_out_by_weight(sources, packing):
    loader = loader_of(sources, packing=packing)
    batches = take(loader, 100)
    tokens, rows = collections.Counter(), collections.Counter()
    for batch in batches:
        own = [source_of(row) for row in batch["tokens"]]
        rows.update(own)
        for number, segments in zip(own, batch["segment_ids"], strict=True):
            tokens[number] += int((segments > 0).sum())
    shares = [tokens[number] / sum(tokens.values()) for number in range(3)]
    np.testing.assert_allclose(shares, WEIGHTS, atol=0.004)  # 1,000 rows: two of them are 0.002, and some have padding
    drawn = loader.drawn(100)
    assert [one.name for one in drawn] == [*sources] and [one.share for one in drawn] == pytest.approx(WEIGHTS)
    for number, (one, shards) in enumerate(zip(drawn, sources.values(), strict=True)):
        assert one.epochs == rows[number] / len(make_rows(shards, 4, packing)) and one.num_tokens == shards.num_tokens
    assert drawn[1].epochs > 2 and loader.padding_fraction == pytest.approx(
        np.mean([batch["segment_ids"] == 0 for batch in batches]), abs=0.01
    )


@pytest.mark.parametrize("packing", ["cut", "whole"])
def test_each_source_has_epochs_of_its_own_each_in_another_order(sources, packing):
    every = {
        name: sorted(
            row.tobytes()
            for row in make_rows(shards, 4, packing).read(range(len(make_rows(shards, 4, packing))))["tokens"]
        )
        for name, shards in sources.items()
    }
    rows = [row for batch in take(loader_of(sources, packing=packing, global_batch=1), 1200) for row in batch["tokens"]]
    for number, expected in enumerate(every.values()):
        own = [row.tobytes() for row in rows if source_of(row) == number]
        epochs = [own[i : i + len(expected)] for i in range(0, len(own) - len(expected) + 1, len(expected))]
        assert epochs and all(sorted(epoch) == expected for epoch in epochs)
        assert len(epochs) == 1 or len(set(expected)) == 1 or epochs[0] != epochs[1]


def test_every_batch_has_its_share_and_no_place_one_source(sources):
    """Devices, and replicas that train apart, read the same places of every batch."""
    batches = take(loader_of(sources, (0.5, 0.3, 0.2)), 50)
    places = np.array([[source_of(row) for row in batch["tokens"]] for batch in batches])
    counts = np.array([np.bincount(one, minlength=3) for one in places])
    assert abs(counts - (5, 3, 2)).max() <= 1  # of rows that are as full
    assert all(len(set(places[:, place])) == 3 for place in range(10))


@settings(deadline=None, max_examples=8)
@given(
    data=st.data(), packing=st.sampled_from(["cut", "whole"]), global_batch=st.integers(1, 9), stop=st.integers(0, 30)
)
def test_any_processes_read_the_same_and_go_on_anywhere(sources, data, packing, global_batch, stop):
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=global_batch, max_size=global_batch)))
    options = {"global_batch": global_batch, "packing": packing}
    whole = loader_of(sources, **options)
    take(whole, stop)
    state = json.loads(json.dumps(whole.get_state()))
    expected = take(whole, 6)
    for process in set(owner.tolist()):
        rows = np.flatnonzero(owner == process)
        part = loader_of(sources, rows=rows.tolist(), prefetch=0, **options)
        part.set_state(state)
        for batch, found in zip(expected, take(part, 6), strict=True):
            assert all((found[name] == batch[name][rows]).all() for name in batch)


def test_a_position_in_another_mixture_is_refused(sources):
    state, plain = (
        loader_of(sources).get_state(),
        Loader(TokenShards.join([*sources.values()]), seq_len=4, global_batch=10, seed=5),
    )
    with pytest.raises(ShardlmError, match=r"weights was \[0.6, 0.3, 0.1\], is \[0.5, 0.3, 0.2\]"):
        loader_of(sources, (0.5, 0.3, 0.2)).set_state(state)
    with pytest.raises(ShardlmError, match=r"weights was \[0.6, 0.3, 0.1\], is None"):
        plain.set_state(state)
    with pytest.raises(ShardlmError, match=r"weights was None, is \[0.6, 0.3, 0.1\]"):
        loader_of(sources).set_state(plain.get_state())
    assert plain.get_state().keys().isdisjoint(("weights", "sources"))


def test_a_source_without_a_token_to_learn_is_refused(sources, make_shards):
    with pytest.raises(ShardlmError, match=r"bare of data\.train has no token to learn: leave it and its weight out"):
        MixedRows(sources | {"bare": make_shards([[0]])}, (1, 1, 1, 1), 8, "cut")


@pytest.mark.parametrize("axes", [False, True])
def test_images_of_one_source_stand_in_its_rows(tmp_path, axes):
    own = sight(axes)
    (tmp_path / "0.png").write_bytes(png(32, 48, 0))
    (tmp_path / "1.png").write_bytes(png(16, 32, 1))
    ask = lambda n: said("user", {"type": "image", "path": f"{n}.png"}, "fox")  # noqa: E731
    seen = shards_of([{"messages": [ask(n % 2), said("assistant", "the dog")]} for n in range(5)], tmp_path, own)
    text = shards_of([{"messages": [said("user", "fox"), said("assistant", "dog")]}] * 9, tmp_path, own, name="text")
    sources = {"text": text, "seen": seen}
    options = {"packing": "whole", "sight": own, "look": list, "seq_len": 60, "global_batch": 6}
    for batch in take(loader_of(sources, (1, 1), **options), 2):
        images = batch.pop("images")
        assert images and [one.row for one in images] == sorted(one.row for one in images)
        assert ("turns" in batch) == axes
        for one in images:
            assert (batch["tokens"][one.row][one.takes] == own.vector).all()
            assert one.picture().vectors == len(one.takes)


@pytest.fixture
def config(tmp_path):
    for name in ("web", "code", "held/web", "held/code"):
        (tmp_path / name).mkdir(parents=True)
        for i in range(5):
            (tmp_path / name / f"{i}.txt").write_text(f"document {i} of {name}\n" * 20)
    return DataConfig(
        train=(f"{tmp_path}/web", f"{tmp_path}/code"),
        validation=(f"{tmp_path}/held/web", f"{tmp_path}/held/code"),
        tokenizer="bpe:300",
        cache_dir=str(tmp_path / "cache"),
        weights=(3.0, 1.0),
    )


def test_each_source_is_prepared_once_whatever_it_is_mixed_with(config, tmp_path):
    stages = []
    made = prepare(config, lambda stage, done, total: stages.append(stage))
    assert [*made.train_sources] == [*made.validation_sources] == ["web", "code"]
    assert made.train.num_tokens == sum(shards.num_tokens for shards in made.train_sources.values())
    assert {"training the tokenizer", "tokenising source web", "tokenising source code"} == set(stages)
    given = dataclasses.replace(config, tokenizer=str(made.tokenizer_path))
    stages.clear()
    other = dataclasses.replace(given, train=config.train[1:], validation=config.train[1:], weights=(1.0,))
    assert (
        prepare(other, lambda stage, *_: stages.append(stage)).train.fingerprint
        == made.train_sources["code"].fingerprint
    )
    assert not stages
    shards = dataclasses.replace(given, train=(str(made.train_sources["web"].directories[0]), config.train[1]))
    beside = prepare(shards, lambda stage, *_: stages.append(stage))  # shards beside text
    assert beside.train.fingerprint == made.train.fingerprint and not stages
    with pytest.raises(ShardlmError, match=r"data\.tokenizer is bpe:300, but data\.train is token shards"):
        prepare(dataclasses.replace(shards, tokenizer="bpe:300"))
    plain = prepare(dataclasses.replace(given, weights=()))
    assert not plain.train_sources and plain.train.num_documents == made.train.num_documents


def test_weights_are_checked():
    def config(*weights, train=("a", "b"), validation=("c",)):
        return DataConfig(train=train, validation=validation, weights=weights)

    with pytest.raises(ShardlmError, match=r"data\.weights=\(1\.0,\) are 1 for the 2 entries of data\.train \(a, b\)"):
        config(1.0)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ShardlmError, match=rf"data\.weights has {bad}: each is above 0"):
            config(1.0, bad)
    with pytest.raises(ShardlmError, match=r"data\.train has a twice beside data\.weights: name it once"):
        config(1.0, 1.0, train=("a", "a"))
    with pytest.raises(ShardlmError, match=r"data\.validation has c twice beside data\.weights"):
        config(1.0, 1.0, validation=("c", "c"))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("shards/web", "/data/code/"), ["web", "code"]),
        (("web/val.jsonl", "code/val.jsonl"), ["web/val.jsonl", "code/val.jsonl"]),
        (("/d/web/*.jsonl", "/d/code/*.jsonl"), ["web/*.jsonl", "code/*.jsonl"]),
        (("stdlib:train", "a"), ["stdlib:train", "a"]),
        (("a", "b/a"), ["a", "b/a"]),
        (("./a", "a"), ["./a", "a"]),
    ],
)
def test_names_of_sources(paths, names):
    assert names_of(paths) == names
