"""Replies in rows: each whole, one after the other, in the first microbatches."""

import numpy as np
import pytest

from shardlm.reinforce.rows import Reply, rows_of
from shardlm.train.policy import ADVANTAGES, SAMPLED

T = 16


def replies(seed: int = 0) -> list[Reply]:
    rng = np.random.default_rng(seed)
    found = []
    for number in range(12):
        prompt, told = (tuple(rng.integers(1, 50, n).tolist()) for n in rng.integers(1, 6, 2))
        found.append(Reply(prompt, told, tuple(-rng.random(len(told))), float(number + 1), taught=number != 4))
    return found


@pytest.mark.parametrize("microbatches", [1, 3, 6])
def test_every_reply_stands_whole_in_one_row(microbatches):
    given = replies()
    batch = rows_of(given, 12, T, microbatches, "dapo")
    found = []
    for row in range(12):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            at = batch["segment_ids"][row] == segment
            assert batch["positions"][row, at].tolist() == list(range(at.sum()))
            tokens = [*batch["tokens"][row, at].tolist(), batch["targets"][row, at][-1].item()]
            assert tokens[1:] == batch["targets"][row, at].tolist()
            mask = batch[ADVANTAGES][row, at] != 0
            told, gained = batch[SAMPLED][row, at][mask], set(batch[ADVANTAGES][row, at][mask].tolist())
            found.append((tokens, mask.sum(), np.round(told, 5).tolist(), gained, batch["loss_mask"][row, at].tolist()))
    expected = []
    for reply in given:
        n, told = len(reply.prompt) - 1, len(reply.tokens)
        mask = [0.0] * n + [float(reply.taught)] * told
        kept = np.round(np.float32(reply.logprobs), 5).tolist()
        expected.append(([*reply.prompt, *reply.tokens], told, kept, {reply.advantage}, mask))
    assert sorted(found, key=str) == sorted(expected, key=str)
    filled = np.flatnonzero(batch["segment_ids"].any(axis=1))
    assert len(filled) < 8 and set(filled % microbatches) == set(range(-(-len(filled) * microbatches // 12)))
    empty = np.setdiff1d(np.arange(12), filled)
    assert not any(batch[name][empty].any() for name in batch)


def test_a_mean_over_replies_weighs_each_the_same():
    batch = rows_of(replies(), 12, T, 1, "grpo")
    assert abs(batch["loss_mask"].sum() - 11) < 1e-5  # of 12 one is not taught
