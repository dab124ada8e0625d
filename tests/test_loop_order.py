"""When the loop looks at a step: while the next one runs, unless the next batch is made with what it comes to, whose
making would be counted with the step's time."""

import contextlib
import dataclasses
import pathlib
import types
from typing import Any
from unittest import mock

import pytest

from shardlm.checkpoint import CheckpointConfig
from shardlm.checkpoint_messages import SaveFailed
from shardlm.metrics.goodput import Goodput
from shardlm.reinforce.rollouts import Rollouts
from shardlm.train.config import TrainConfig
from shardlm.train.faults import StopSignal
from shardlm.train.loop import Run
from shardlm.train.resume import resume


@dataclasses.dataclass(frozen=True)
class State:
    params: Any = None
    frozen: Any = None
    ema: Any = None


class Recorded(Run):
    """Of a run what happens to whom; `seen`, what is known of each step when it is seen."""

    def __init__(self, follows=False, steps=3, due=lambda step: False, checkpoints=None, stop=None):
        self.events: list[str] = []
        self.seen: list[dict[str, float]] = []
        self.stop = stop or StopSignal()
        source = types.SimpleNamespace(
            waits_for="data", follows=follows, epoch=0.0, next=self._batch, get_state=dict, close=None
        )
        config = types.SimpleNamespace(
            train=TrainConfig(steps=steps, eval_every=9), checkpoint=CheckpointConfig(every_steps=2)
        )
        names = ("task", "log", "progress", "meter")
        super().__init__(
            program=types.SimpleNamespace(config=config),
            source=source,
            checkpoints=checkpoints or mock.MagicMock(due=due),
            train_step=self._step,
            goodput=mock.MagicMock(measure=lambda category: contextlib.nullcontext()),
            profiler=mock.MagicMock(is_edge=lambda step: False, reached=lambda step, state: ""),
            evaluator=self._evaluated,
            state=State(),
            step=0,
            **{name: mock.MagicMock() for name in names},
        )

    def go(self):
        self.until_done_or_stopped(self.stop)

    def report(self, step, metrics, clock):
        self.events.append(f"seen {step}")
        self.seen.append(metrics)
        self.step = step
        return clock

    def _evaluated(self, params, frozen, stops):
        return {"validation_loss": 1.0, "perplexity": 2.0}

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


def test_what_one_process_alone_knows_ends_the_run():
    """The others wait for it; of what all know, as of one process, the run goes on (above)."""

    class Theirs(Disk):
        def save(self, step, *_):
            error = SaveFailed(f"Checkpoint {step} could not be written.", "Free some space.")
            error.everywhere = False
            raise error

    with pytest.raises(SaveFailed, match="Checkpoint 2 could not be written"):
        Recorded(steps=8, checkpoints=Theirs()).go()


class Preempted(Recorded):
    """Evaluated after step 2, in six batches, of which it is told at one to stop."""

    def __init__(self, at, name="SIGTERM"):
        super().__init__()
        self.program.config.train = TrainConfig(steps=4, eval_every=2)
        self.at, self.by, self.batches = at, name, 0

    def _evaluated(self, params, frozen, stops):
        for batch in range(6):
            if stops():
                return {}
            self.batches += 1
            if batch == self.at:
                self.stop.name = self.by
        return super()._evaluated(params, frozen, stops)


def saved(run):
    return [(call.args[0], call.args[3]) for call in run.checkpoints.save.call_args_list]


def test_a_signal_ends_an_evaluation_after_its_batch_and_the_run_is_saved():
    run = Preempted(at=3)
    run.go()
    assert run.batches == 4 and run.events[-1] == "seen 2"
    assert saved(run) == [(2, {})] and not run.log.write.called
    assert run.stop.told and run.validation == {}


@pytest.mark.parametrize(("by", "down"), [("SIGTERM", 490.0), ("SIGINT", 0.0)])
def test_a_run_that_its_scheduler_stopped_is_down_until_it_goes_on(tmp_path, monkeypatch, by, down):
    """A pause of its user is none of its time."""
    clock = [1000.0]
    monkeypatch.setattr("shardlm.metrics.goodput.time.time", lambda: clock[0])
    run = Preempted(3, by)
    with Goodput(tmp_path, step=0, started=1000.0) as run.goodput:
        run.go()
    clock[0] = 1490.0
    with Goodput(tmp_path, step=2, started=1490.0) as again:
        assert again.summary().seconds["down"] == down


def test_an_evaluation_that_is_done_when_the_signal_comes_counts():
    run = Preempted(at=5)
    run.go()
    values = {"validation_loss": 1.0, "perplexity": 2.0}
    assert run.batches == 6 and saved(run) == [(2, values)]
    run.log.write.assert_called_once_with(2, values)


def test_who_is_told_before_an_evaluation_does_not_begin_it():
    run = Preempted(at=None)

    def step(number, state, batch):
        run.stop.name = "SIGTERM" if number == 4 else None
        return run._step(number, state, batch)

    run.train_step = step
    run.go()
    assert run.batches == 6 and [at for at, _ in saved(run)] == [4] and saved(run)[0][1] == {}


def test_an_evaluation_that_is_owed_is_made_first():
    run = Preempted(at=None)
    run.step, run.owes = 2, True
    run.go()
    assert [call.args[0] for call in run.log.write.call_args_list] == [2, 4]
    again = Preempted(at=1)
    again.step, again.owes = 2, True
    again.go()
    assert again.stop.told and not again.events and not saved(again)


@pytest.mark.parametrize(
    ("step", "metrics", "owes"),
    [(4, {"validation_loss": 1.0}, False), (4, {}, True), (3, {}, False), (8, {"validation_loss": 1.0}, True)],
    ids=["evaluated", "interrupted", "not due", "over"],
)
def test_what_a_checkpoint_owes(step, metrics, owes):
    """Of every second of eight steps; where the run is over, it is evaluated as it is."""
    state = State()
    restored = types.SimpleNamespace(state=state, step=step, metrics=metrics, data_state={})
    checkpoints = mock.MagicMock(removed=(), directory=pathlib.Path("run"), restore=lambda shapes: restored)
    config = types.SimpleNamespace(train=TrainConfig(steps=8, eval_every=2))
    program = mock.MagicMock(config=config, state_shapes=lambda: state, frozen=lambda: None)
    assert resume(program, checkpoints, mock.MagicMock())[1:3] == (step, owes)


def test_replies_follow_from_the_steps_before_and_further_updates_with_them_do_not():
    rollouts = Rollouts(None, None, None)
    assert rollouts.follows
    rollouts._left = 1
    assert not rollouts.follows
