"""The loss of each validation source beside that of the whole, by a program that is a sum on the host."""

import dataclasses
import types

import numpy as np
import pytest

from shardlm.data.config import DataConfig
from shardlm.data.prepare import Prepared, prepare
from shardlm.errors import ShardlmError
from shardlm.metrics.log import MetricsLog
from shardlm.train import evaluate
from shardlm.train.config import TrainConfig
from shardlm.train.report import describe_validation


@pytest.fixture
def data(tmp_path) -> Prepared:
    for name, words in (("web", "a few words " * 40), ("code", "f(x) " * 300)):
        (tmp_path / f"{name}.txt").write_text(words)
    paths = tuple(f"{tmp_path}/{name}.txt" for name in ("web", "code"))
    return prepare(DataConfig(paths, paths, "bpe:257", cache_dir=f"{tmp_path}/cache", weights=(1.0, 1.0)))


def evaluator(data, monkeypatch, eval_batches=0) -> evaluate.Evaluator:
    """Its loss of a token is the token's number."""
    monkeypatch.setattr(evaluate, "local_rows", lambda *_: (0, 1, 2, 3))
    program = types.SimpleNamespace(
        config=types.SimpleNamespace(
            train=TrainConfig(global_batch=4, seq_len=32, eval_batches=eval_batches), data=DataConfig()
        ),
        objective=types.SimpleNamespace(counted="tokens"),
        batch_sharding=None,
        slots=None,
        eyes=lambda params, eyes: None,
        looking=dict,
        on_devices=lambda batch, rows, eyes: batch,
    )

    def compiled(params, frozen, batch):
        mask = batch["loss_mask"]
        return {"loss": np.sum(batch["targets"] * mask), "tokens": np.sum(mask)}

    return evaluate.Evaluator(program, data, compiled)


def mean_token(shards) -> float:
    tokens = shards.window(0, shards.num_tokens)
    return float(tokens[1:].mean())  # each source is one document


def test_each_source_has_its_loss_and_the_whole_is_of_all_tokens(data, monkeypatch, tmp_path):
    values = evaluator(data, monkeypatch)(None)
    sources = data.validation_sources
    for name, shards in sources.items():
        assert values[f"validation_loss/{name}"] == pytest.approx(mean_token(shards))
    scored = [shards.num_tokens - 1 for shards in sources.values()]
    whole = np.average([mean_token(shards) for shards in sources.values()], weights=scored)
    assert values["validation_loss"] == pytest.approx(whole) and [*sources] == ["web.txt", "code.txt"]
    assert f"(web.txt {values['validation_loss/web.txt']:.4f}, code.txt " in describe_validation(values)
    with MetricsLog(tmp_path) as log:
        log.write(3, values)
    assert '"validation_loss/code.txt"' in (tmp_path / "metrics.jsonl").read_text()
    [events] = (tmp_path / "tensorboard").iterdir()
    assert b"validation_loss/code.txt" in events.read_bytes()


def test_a_part_of_each_source_stands_for_all_of_it(data, monkeypatch):
    """1 batch of 4 rows, of 15 rows and of 47."""
    read = evaluator(data, monkeypatch, eval_batches=1)(None)
    losses = [read["validation_loss/web.txt"], read["validation_loss/code.txt"]]
    tokens = [shards.num_tokens for shards in data.validation_sources.values()]
    assert read["validation_loss"] == pytest.approx(np.average(losses, weights=tokens), rel=0.02)
    assert abs(read["validation_loss"] - np.mean(losses)) > 0.02 * read["validation_loss"]


def test_one_source_is_the_whole(data, monkeypatch):
    one = dataclasses.replace(data, validation_sources={"web.txt": data.validation})
    signs = []
    monkeypatch.setattr(evaluate, "alive", lambda: signs.append(1))
    found = evaluator(one, monkeypatch)
    assert found(None).keys() == {"validation_loss", "perplexity", "bits_per_byte"}
    assert len(signs) == len([*found.batches()])  # of life, of each batch


def test_it_stops_before_the_batch_that_it_is_told_at(data, monkeypatch):
    found, told = evaluator(data, monkeypatch), iter([False, False, True])
    begun = []
    counting = dataclasses.replace(found, compiled=lambda *args: begun.append(1) or found.compiled(*args))
    assert counting(None, None, lambda: next(told)) == {} and len(begun) == 2


def test_a_source_without_a_scored_token_is_told(data, monkeypatch):
    found = evaluator(data, monkeypatch)
    silent = dataclasses.replace(found, compiled=lambda *_: {"loss": 0.0, "tokens": 0.0})
    with pytest.raises(ShardlmError, match=r"web\.txt of data\.validation has nothing to score"):
        silent(None)


def test_it_is_told_before_a_run_has_done_a_step(data, monkeypatch):
    """As of long prompts that are cut into rows, of which few hold an answer."""
    read = evaluate.validation_batches
    evaluator(data, monkeypatch).check()
    masked = lambda *what, **how: ({**batch, "loss_mask": batch["loss_mask"] * 0} for batch in read(*what, **how))  # noqa: E731
    monkeypatch.setattr(evaluate, "validation_batches", masked)
    told = r"web\.txt of data\.validation has nothing to score, no token to learn in the train.eval_batches=2 that are"
    with pytest.raises(ShardlmError, match=told):
        evaluator(data, monkeypatch, eval_batches=2).check()
