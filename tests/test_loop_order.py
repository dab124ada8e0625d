"""When the loop looks at a step: while the next one runs, unless the next batch is made with what it comes to, whose
making would be counted with the step's time."""

import contextlib
import dataclasses
import types
from typing import Any
from unittest import mock

import pytest

from shardlm.checkpoint import CheckpointConfig
from shardlm.checkpoint_messages import SaveFailed
from shardlm.reinforce.rollouts import Rollouts
from shardlm.train.config import TrainConfig
from shardlm.train.loop import Run


@dataclasses.dataclass(frozen=True)
class State:
    frozen: Any = None


class Recorded(Run):
    """Of a run what happens to whom; `seen`, what is known of each step when it is seen."""

    def __init__(self, follows=False, steps=3, due=lambda step: False, checkpoints=None):
        self.events: list[str] = []
        self.seen: list[dict[str, float]] = []
        source = types.SimpleNamespace(
            waits_for="data", follows=follows, epoch=0.0, next=self._batch, get_state=dict, close=None
        )
        config = types.SimpleNamespace(
            train=TrainConfig(steps=steps, eval_every=9), checkpoint=CheckpointConfig(every_steps=2)
        )
        names = ("task", "evaluator", "log", "progress", "meter")
        super().__init__(
            program=types.SimpleNamespace(config=config),
            source=source,
            checkpoints=checkpoints or mock.MagicMock(due=due),
            train_step=self._step,
            goodput=mock.MagicMock(measure=lambda category: contextlib.nullcontext()),
            profiler=mock.MagicMock(is_edge=lambda step: False, reached=lambda step, state: ""),
            state=State(),
            step=0,
            **{name: mock.MagicMock() for name in names},
        )

    def go(self):
        self.until_done_or_stopped(types.SimpleNamespace(agreed=lambda step: False))

    def report(self, step, metrics, clock):
        self.events.append(f"seen {step}")
        self.seen.append(metrics)
        return clock

    def evaluate(self, state):
        return {}

    def _batch(self, state):
        self.source.epoch += 0.5
        self.events.append(f"batch {1 + sum('step' in event for event in self.events)}")
        return {}, {}

    def _step(self, number, state, batch):
        self.events.append(f"step {number}")
        return state, {}


@pytest.mark.parametrize(
    ("follows", "expected"),
    [
        (False, "batch 1, step 1, batch 2, step 2, seen 1, batch 3, step 3, seen 2, seen 3"),
        (True, "batch 1, step 1, seen 1, batch 2, step 2, seen 2, batch 3, step 3, seen 3"),
    ],
)
def test_a_step_is_seen_before_a_batch_that_follows_from_it(follows, expected):
    run = Recorded(follows)
    run.go()
    assert ", ".join(run.events) == expected


@pytest.mark.parametrize("follows", [False, True])
def test_the_epoch_of_a_step_is_that_of_its_batch(follows):
    run = Recorded(follows)
    run.go()
    assert [metrics["epoch"] for metrics in run.seen] == [0.5, 1.0, 1.5]


class Disk:
    """Checkpoints of every second step, of which these fail: as they begin, or while they are written."""

    directory = "run/checkpoints"

    def __init__(self, at_once=(), later=()):
        self.at_once, self.later, self.whole, self._saving = at_once, later, [], None

    def due(self, step):
        return step % 2 == 0

    def save(self, step, *_):
        if step in self.at_once:
            raise SaveFailed(f"Checkpoint {step} could not be written.", "Free some space.")
        self._saving = step

    def wait(self):
        step, self._saving = self._saving, None
        if step in self.later:
            raise SaveFailed(f"Checkpoint {step} could not be written.", "Free some space.")
        self.whole += [step] if step else []


@pytest.mark.parametrize("how", ["at_once", "later"])
@pytest.mark.parametrize(
    ("failing", "whole", "ends_by"),
    [
        ([2], [4, 6, 8], None),
        ([2, 6], [4, 8], None),  # not in a row
        ([2, 4], [], 4),
        ([8], [2, 4, 6], 8),  # the last, which is another one's before it
        ([6], [2, 4, 8], None),
    ],
)
def test_a_run_goes_on_without_a_checkpoint_and_ends_with_the_second_in_a_row(how, failing, whole, ends_by):
    disk = Disk(**{how: failing})
    run = Recorded(steps=8, checkpoints=disk)
    if ends_by:
        with pytest.raises(SaveFailed, match=f"Checkpoint {ends_by} could not be written. Free some space."):
            run.go()
    else:
        run.go()
    assert disk.whole == whole
    said = [call.args[0] for call in run.progress.note.call_args_list if call.args[0].startswith("warning")]
    missed = [step for step in failing if step != ends_by]
    assert said == [
        f"warning: Checkpoint {step} could not be written. The run goes on, and saves again within 2 steps: free some "
        "space"
        for step in missed
    ]


def test_replies_follow_from_the_steps_before_and_further_updates_with_them_do_not():
    rollouts = Rollouts(None, None, None)
    assert rollouts.follows
    rollouts._left = 1
    assert not rollouts.follows
