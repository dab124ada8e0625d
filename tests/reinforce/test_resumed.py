"""Replies that further updates are made with go on with a run that resumes."""

import json
import types

import pytest

from shardlm.errors import ShardlmError
from shardlm.reinforce.prompts import Order, Prompt
from shardlm.reinforce.rollouts import Rollouts
from shardlm.reinforce.rows import Reply
from shardlm.train.config import GrpoConfig, TrainConfig


def rollouts(seq_len: int) -> Rollouts:
    grpo, train = GrpoConfig(("a:b",), group_size=2, max_tokens=8), TrainConfig(global_batch=2, seq_len=seq_len)
    program = types.SimpleNamespace(config=types.SimpleNamespace(train=train, grpo=grpo))
    return Rollouts(program, None, Order((Prompt("a", (1, 2), {}),), 0))


def test_replies_that_are_left_are_those_that_were_sampled_and_fit_the_rows():
    first, second = rollouts(16), rollouts(9)
    first._taken, first._left, first._told = 4, 1, {"reward": 0.5}
    first._replies = [Reply((1, 2), (3,) * count, (-0.1,) * count, 0.1, taught=count > 1) for count in (1, 8)]
    saved = json.loads(json.dumps(first.get_state()))
    second.set_state(saved)
    assert second._replies == first._replies and second.get_state() == first.get_state()
    with pytest.raises(ShardlmError, match=r"train.seq_len=8: 1 updates are left .* the longest takes 9 places"):
        rollouts(8).set_state(saved)
