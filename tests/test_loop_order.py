"""When the loop looks at a step: while the next one runs, unless the next batch is made with what it comes to, whose
making would be counted with the step's time."""

import contextlib
import dataclasses
import types
from typing import Any
from unittest import mock

import pytest

from shardlm.reinforce.rollouts import Rollouts
from shardlm.train.config import TrainConfig
from shardlm.train.loop import Run


@dataclasses.dataclass(frozen=True)
class State:
    frozen: Any = None


@pytest.mark.parametrize(
    ("follows", "expected"),
    [
        (False, "batch 1, step 1, batch 2, step 2, seen 1, batch 3, step 3, seen 2, seen 3"),
        (True, "batch 1, step 1, seen 1, batch 2, step 2, seen 2, batch 3, step 3, seen 3"),
    ],
)
def test_a_step_is_seen_before_a_batch_that_follows_from_it(follows, expected):
    events: list[str] = []

    class Recorded(Run):
        def report(self, step, metrics, clock):
            events.append(f"seen {step}")
            return clock

        def evaluate(self, state):
            return {}

    def batch(state):
        events.append(f"batch {1 + sum('step' in event for event in events)}")
        return {}, {}

    def step(number, state, batch):
        events.append(f"step {number}")
        return state, {}

    source = types.SimpleNamespace(waits_for="data", follows=follows, next=batch, get_state=dict)
    program = types.SimpleNamespace(config=types.SimpleNamespace(train=TrainConfig(steps=3, eval_every=9)))
    beside = {name: mock.MagicMock() for name in ("task", "evaluator", "log", "progress", "meter")}
    beside["checkpoints"] = mock.MagicMock(due=lambda step: False)
    beside["goodput"] = mock.MagicMock(measure=lambda category: contextlib.nullcontext())
    beside["profiler"] = mock.MagicMock(is_edge=lambda step: False, reached=lambda step, state: "")
    run = Recorded(program=program, source=source, train_step=step, state=State(), step=0, **beside)
    run.until_done_or_stopped(types.SimpleNamespace(agreed=lambda: False))
    assert ", ".join(events) == expected


def test_replies_follow_from_the_steps_before_and_further_updates_with_them_do_not():
    rollouts = Rollouts(None, None, None)
    assert rollouts.follows
    rollouts._left = 1
    assert not rollouts.follows
