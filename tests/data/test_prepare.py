import dataclasses
import multiprocessing
import os
import shutil
import threading
from pathlib import Path

import pytest

from shardlm.data.config import DataConfig
from shardlm.data.corpus import find_sources
from shardlm.data.prepare import _lock, prepare, tokenizer_from
from shardlm.data.shards import TokenShards
from shardlm.errors import ShardlmError
from shardlm.tokenizer import Tokenizer


@pytest.fixture
def config(tmp_path):
    """Text to train on and to validate with."""
    for name, count in (("train", 40), ("validation", 5)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i:02d}.txt").write_text(f"document {i} of {name}\n" * 20)
    return DataConfig(
        train=(str(tmp_path / "train"),),
        validation=(str(tmp_path / "validation"),),
        tokenizer="bpe:300",
        cache_dir=str(tmp_path / "cache"),
    )


def replace(config, **changes):
    return dataclasses.replace(config, **changes)


def test_text_becomes_shards_once(config):
    stages = []
    first = prepare(config, lambda stage, done, total: stages.append((stage, done / total)))
    assert (first.train.num_documents, first.validation.num_documents) == (40, 5)
    assert first.train.tokenizer == first.tokenizer.fingerprint == Tokenizer.load(first.tokenizer_path).fingerprint
    for stage in ("training the tokenizer", "tokenising train", "tokenising validation"):
        assert (stage, 1.0) in stages
    stages.clear()
    again = prepare(config, lambda *progress: stages.append(progress))
    assert not stages and again.train.fingerprint == first.train.fingerprint


def test_what_is_to_be_both_is_made_once(config):
    stages = []
    made = prepare(replace(config, validation=config.train), lambda stage, done, total: stages.append(stage))
    assert made.validation.directories == made.train.directories and "tokenising validation" not in stages


def test_what_changes_the_tokens_makes_new_ones(config, tmp_path):
    first = prepare(config)
    assert prepare(replace(config, tokenizer="bpe:280")).tokenizer.vocab_size == 280
    assert prepare(replace(config, packing="whole", seed=3)).train.directories == first.train.directories
    os.utime(tmp_path / "train" / "07.txt", ns=(1, 1))
    assert prepare(config).train.directories != first.train.directories
    (tmp_path / "train" / "99.txt").write_text("new")
    assert prepare(config).train.num_documents == 41


def test_an_interrupted_preparation_is_finished(config):
    first = prepare(config)
    (first.validation.directories[0] / "meta.json").unlink()
    assert prepare(config).validation.fingerprint == first.validation.fingerprint


def test_the_same_text_gives_the_same_data_elsewhere(config, tmp_path):
    elsewhere = prepare(replace(config, cache_dir=str(tmp_path / "other")))
    assert elsewhere.train.fingerprint == prepare(config).train.fingerprint


def test_shards_are_used_where_they_are(config, tmp_path):
    made = prepare(config)
    shards = replace(
        config,
        train=(str(made.train.directories[0]),),
        validation=(str(made.validation.directories[0]),),
        tokenizer=str(made.train.directories[0] / "tokenizer.json"),
    )
    used = prepare(shards)
    assert used.train.directories == made.train.directories
    assert prepare(replace(shards, validation=config.validation)).validation.fingerprint == made.validation.fingerprint
    twice = prepare(replace(shards, train=shards.train * 2))
    assert twice.train.num_tokens == 2 * made.train.num_tokens
    with pytest.raises(ShardlmError, match=r"data.tokenizer is bpe:300, but data.train is token shards.*set data"):
        prepare(replace(shards, tokenizer="bpe:300"))
    with pytest.raises(ShardlmError, match=r"token shards \(.*\) and text \(.*\) in one dataset"):
        prepare(replace(shards, train=shards.train + config.train))
    other = prepare(replace(config, tokenizer="bpe:280"))
    with pytest.raises(
        ShardlmError,
        match=r"data.train .* made by another tokenizer, of vocabulary 300, than .*, of 280: set data",
    ):
        prepare(replace(shards, tokenizer=str(other.tokenizer_path)))


def test_a_pattern_of_shards_is_all_of_them(config, tmp_path):
    made = prepare(config)
    path = str(made.tokenizer_path)
    for part in ("a", "b"):
        shutil.copytree(made.train.directories[0], tmp_path / "shards" / part)
    both = prepare(replace(config, train=(f"{tmp_path}/shards/*",), tokenizer=path))
    assert both.train.num_tokens == 2 * made.train.num_tokens and both.train.directories[0].name == "a"
    shutil.copytree(tmp_path / "validation", tmp_path / "shards" / "text")
    with pytest.raises(ShardlmError, match=r"no text under the directory|unsupported format"):
        prepare(replace(config, train=(f"{tmp_path}/shards/*",), tokenizer=path))


def test_the_standard_library_is_prepared_from_two_files(config, tmp_path):
    prepared = prepare(replace(config, train=("stdlib:validation",), validation=("stdlib:validation",)))
    assert prepared.train.num_documents > 10
    assert sorted(p.name for p in tmp_path.glob("cache/stdlib-*/*")) == ["train.jsonl", "validation.jsonl"]


def test_one_waits_while_another_prepares(config):
    done = []
    waiting = threading.Thread(target=lambda: done.append(prepare(config)), daemon=True)
    with _lock(Path(config.cache_dir)):
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive() and os.listdir(config.cache_dir) == [".lock"]
    waiting.join(60)
    assert done[0].train.num_documents == 40


def test_concurrent_processes_prepare_once(config):
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        found = pool.map(_prepare_and_report, [config] * 3)
    assert len({fingerprint for fingerprint, _ in found}) == 1
    assert sorted(worked for _, worked in found) == [False, False, True]


def _prepare_and_report(config) -> tuple[str, bool]:
    stages = set()
    prepared = prepare(config, lambda stage, done, total: stages.add(stage))
    return TokenShards.open(*prepared.train.directories).fingerprint, bool(stages)


def test_a_tokenizer_is_trained_on_a_sample_of_much_text(config, monkeypatch):
    whole = prepare(config).tokenizer
    monkeypatch.setattr("shardlm.data.prepare._TRAINING_BYTES", 2000)
    sample = tokenizer_from("bpe:300", find_sources(config.train))
    assert sample.vocab_size <= whole.vocab_size
    assert sample.fingerprint == tokenizer_from("bpe:300", find_sources(config.train)).fingerprint


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "bpe:-4"])
def test_a_malformed_tokenizer_is_refused(config, spec):
    with pytest.raises(ShardlmError, match=f"tokenizer '{spec}': expected bpe: and a number"):
        prepare(replace(config, tokenizer=spec))


def test_fields_are_checked():
    with pytest.raises(ShardlmError, match=r"data.validation is empty: name at least one file"):
        DataConfig(validation=())
    with pytest.raises(ShardlmError, match=r"data.seed is -1: it must be from 0"):
        DataConfig(seed=-1)


def test_a_cache_that_cannot_be_written_is_refused(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardlmError, match=r"cannot write to the data cache .*Set data.cache_dir"):
        prepare(replace(config, cache_dir=str(tmp_path / "file" / "cache")))
