"""The loop: reads a batch, runs the step, reports, evaluates, saves and stops. One step is in flight while the host
reports the one before it, unless the next batch is made with what it comes to."""

import contextlib
import dataclasses
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardlm import hardware
from shardlm.checkpoint import Checkpoints
from shardlm.checkpoint_messages import SaveFailed
from shardlm.flops import forward_flops, training_flops
from shardlm.metrics.goodput import Goodput
from shardlm.metrics.log import VALIDATION_LOSS, MetricsLog
from shardlm.metrics.progress import ProgressLine, RateMeter, Rates
from shardlm.metrics.trackers import Tracker, check_trackers
from shardlm.models.pretrained import Pretrained
from shardlm.run_files import CHECKPOINTS
from shardlm.run_lock import only_trainer
from shardlm.state import TrainState
from shardlm.train import report
from shardlm.train.alike import check_configs
from shardlm.train.check import check_vocabulary
from shardlm.train.config import RunConfig
from shardlm.train.diloco import readings
from shardlm.train.faults import StopSignal, check_finite
from shardlm.train.profile import Profiler, ProfileSteps
from shardlm.train.program import Program
from shardlm.train.resume import claim, keep, resume
from shardlm.train.strategy import Step
from shardlm.train.stuck import Patience
from shardlm.train.task import Source, Task, Texts


def train(
    config: RunConfig,
    *,
    command: str,
    started: float,
    profile: ProfileSteps | None = None,
    prepare: Callable[[Program], Task] = Texts.prepared,
) -> int:
    """Runs or resumes the run in config.run_dir to its last step, or until a signal; returns the exit status.

    `command` starts this run again, for messages; `started` is when this process began, in seconds since 1970;
    `profile` are steps to profile; `prepare` makes what it learns from, and says which program its batches want.
    Raises ShardlmError for whatever the user can solve.
    """
    if profile:
        profile.check(config.train.steps)
    check_configs(config)
    if jax.process_index() == 0:
        check_trackers(config.trackers)
    if isinstance(config.model, Pretrained):
        config = dataclasses.replace(config, model=config.model.pinned())
    program = Program.make(config, config.mesh.build())
    run_dir = pathlib.Path(config.run_dir)
    task = prepare(program)
    program = task.program
    check_vocabulary(program.model.config, task.tokenizer.vocab_size, getattr(config.model, "folder", ""))
    source = task.source()
    with only_trainer(run_dir) if jax.process_index() == 0 else contextlib.nullcontext():
        changes = claim(run_dir, config, task.tokenizer)
        with (
            jax.set_mesh(program.mesh),
            Checkpoints(run_dir / CHECKPOINTS, config.checkpoint) as checkpoints,
            StopSignal() as stop,
            Run.start(program, task, source, checkpoints, started, profile) as run,
        ):
            stop.listen()
            run.say(report.opening(program, task.described(source), changes, run.step))
            state = run.until_done_or_stopped(stop)
            if stop.told:
                report.stopped(run, stop.name, command)
                return stop.status
            report.finished(run, state, command)
    return 0


@dataclasses.dataclass
class Run:
    """One session of a run: what the loop uses and where it stands. `step` counts finished steps."""

    program: Program
    task: Task
    source: Source
    checkpoints: Checkpoints
    evaluator: Any
    train_step: Step
    goodput: Goodput
    log: MetricsLog
    progress: ProgressLine
    meter: RateMeter
    profiler: Profiler
    state: TrainState | None
    step: int
    owes: bool = False  # whether it begins with the evaluation of what it has
    validation: dict[str, float] = dataclasses.field(default_factory=dict)
    missed: bool = False  # whether the last checkpoint that is known of could not be written
    saving: bool = False  # whether another one has begun

    @classmethod
    def start(
        cls,
        program: Program,
        task: Task,
        source: Source,
        checkpoints: Checkpoints,
        started: float,
        profile: ProfileSteps | None,
    ) -> "Run":
        """Restores or creates the state and compiles; under the program's mesh."""
        config, first = program.config, jax.process_index() == 0
        run_dir = pathlib.Path(config.run_dir)
        state, step, owes, origin = resume(program, checkpoints, source)
        if first:
            keep(run_dir, config, task.tokenizer_path)
        passed = profile.passed(step) if profile else ""
        patience = config.train.stuck_seconds
        with contextlib.ExitStack() as undone:  # where what follows fails
            watch = Patience(patience) if patience else None
            goodput = undone.enter_context(Goodput(run_dir, step, started, first, watch))
            progress = ProgressLine(config.train.steps, step, enabled=first)
            progress.note(origin)
            if passed:
                progress.note(passed)
            with goodput.measure("compile"):
                xla = program.xla_options()
                if xla.left_out:
                    progress.note(xla.report())
                compiled = program.compile_all(dict(xla.options))
                train_step = program.strategy.assemble(compiled)
                evaluator = task.evaluator(dict(xla.options))
            gpu = hardware.lookup(jax.devices()[0].device_kind)
            peak = gpu and gpu.peak.of(config.precision)
            meter = RateMeter(peak, jax.device_count())
            names = config.trackers if first else ()
            log = MetricsLog(
                run_dir, step, first, lambda: [Tracker(n, run_dir, step > 0, progress.note) for n in names]
            )
            texts = lambda: {name: compiled[name].as_text() for name in compiled}  # noqa: E731
            profiler = Profiler(None if passed else profile, program, texts)
            parts = (program, task, source, checkpoints, evaluator, train_step, goodput, log, progress, meter, profiler)
            undone.pop_all()
        return cls(*parts, state, step, owes)

    def __enter__(self) -> "Run":
        self.progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        with contextlib.ExitStack() as closing:  # each, whatever becomes of those before; from the last one on
            closing.callback(self.goodput.__exit__, *error)
            closing.callback(self.source.close)
            closing.callback(self.log.close, failed=error[0] is not None)
            closing.callback(self.progress.__exit__, *error)
            self.say(self.profiler.close())

    def say(self, text: str) -> None:
        """A line above the progress line, from the first process; nothing for ""."""
        if text:
            self.progress.note(text)

    def until_done_or_stopped(self, stop: StopSignal) -> TrainState:
        """Trains to the last step or to a signal, and saves; returns the state it ends with. An evaluation that a
        signal keeps from its end is made by the next start."""
        train, asks, in_flight = self.program.config.train, stop.asking(), None
        if self.owes:
            self.validation = self.evaluate(self.state, stop.asking())
        self.say(self.profiler.reached(self.step, self.state))
        clock = time.monotonic()
        for step in range(self.step + 1, 0 if stop.told else train.steps + 1):
            with self.goodput.measure(self.source.waits_for):
                batch, beside = self.source.next(self.state)
                beside = beside | {"epoch": self.source.epoch}  # now: when it is logged another batch is taken
            with self.goodput.measure("step"):
                with jax.profiler.StepTraceAnnotation("train", step_num=step):
                    self.state, metrics = self.train_step(step, self.state, batch)
                if in_flight:
                    clock = self.report(*in_flight, clock)
                in_flight = (step, metrics | beside)
                last = asks() or step == train.steps
                evaluates = not stop.told and (step % train.eval_every == 0 or step == train.steps)
                waits = self.checkpoints.due(step) or self.profiler.is_edge(step) or self.source.follows
                if last or evaluates or waits:
                    clock, in_flight = self.report(*in_flight, clock), None
            self.say(self.profiler.reached(step, self.state))
            found = self.evaluate(self.state, stop.asking()) if evaluates else {}
            self.validation, last = found or self.validation, last or bool(stop.told)
            if last or self.checkpoints.due(step):
                self.save(step, found, last)
            if last:
                break
            if in_flight is None:
                clock = time.monotonic()
        with self.goodput.measure("checkpoint"):
            self.checkpoints.wait()
        stop.agree()  # of one who is told now, before what all of them do at the end of a run
        if stop.told != signal.SIGTERM:  # else the run is down until it is started again
            self.goodput.stop()
        return self.state

    def save(self, step: int, metrics: dict[str, float], last: bool) -> None:
        """Begins to save. One that fails costs no step: the run goes on, with a warning, and ends with the second in a
        row or with its `last`. In a job of several processes it ends with the first that one alone knows of, which
        failed while it was written; a disk that has no room is found by all, before.

        Raises ShardlmError where the run ends."""
        with self.goodput.measure("checkpoint"):
            with self._may_miss(ends=self.missed and not last):
                self.checkpoints.wait()
                self.missed = self.missed and not self.saving
            self.saving = False
            with self._may_miss(ends=self.missed or last):
                saved = dataclasses.replace(self.state, frozen=None)
                self.checkpoints.save(step, saved, self.source.get_state(), metrics)
                self.saving = True

    @contextlib.contextmanager
    def _may_miss(self, ends: bool) -> Iterator[None]:
        try:
            yield
        except SaveFailed as error:
            if ends or not error.everywhere:
                raise
            self.missed = True
            again = self.program.config.checkpoint.every_steps
            self.say(f"warning: {error.what} The run goes on, and saves again within {again} steps: free some space")

    def report(self, step: int, metrics: dict[str, Any], clock: float) -> float:
        """Waits for a step, checks and logs it; returns the time it was seen done.

        Raises ShardlmError after too many steps that are not finite.
        """
        train = self.program.config.train
        values = readings(metrics)
        now = time.monotonic()
        self.profiler.timed(step, now - clock)
        rates = self.meter.add(1, values["tokens"], self._flops(values), now - clock)
        first_row = (step - 1) * train.global_batch
        bad = check_finite(
            step,
            values,
            max_bad_steps=train.max_bad_steps,
            rows=f"batch {step - 1} (rows {first_row} to {first_row + train.global_batch - 1} of the shuffled epochs)",
            remedy=self._last_good(),
        )
        if bad:
            self.say(bad)
        self.step = step
        self.goodput.step_done(step)
        self.progress.update(step, values["loss"], rates)
        if step % train.log_every == 0 or step == train.steps or bad:
            self.log.write(step, values | _rates(rates))
        return now

    def evaluate(self, state: TrainState, stops: Callable[[], bool]) -> dict[str, float]:
        """Validation metrics, logged; of the averaged weights too, as validation_loss_ema, where there are any. None,
        and none are logged, where it `stops` before its end."""
        with self.goodput.measure("evaluation"):
            values = dict(self.evaluator(state.params, state.frozen, stops))
            if values and state.ema is not None:
                averaged = jax.jit(lambda ema: self.program.trained.place(ema, self.program.rules.rest))(state.ema)
                of_average = self.evaluator(averaged, state.frozen, stops)
                values = of_average and values | {"validation_loss_ema": of_average[VALIDATION_LOSS]}
            stops()  # of who is told at the last batch: no further step is begun
        if not values:
            self.say(f"step {self.step}: the evaluation is left to the next start")
            return {}
        self.log.write(self.step, values)
        self.say(f"step {self.step}: " + report.describe_validation(values))
        return values

    def _flops(self, values: dict[str, float]) -> float:
        model = self.program.model.config
        macs = model.attention_macs(values["attention_pairs"], values["tokens"])
        args, config = (model.parameters_per_token(), values["tokens"], macs), self.program.config
        reference = forward_flops(*args) if config.preference.compares or config.grpo.beta else 0
        return training_flops(*args, frozen=config.lora.rank > 0) + reference + self._teachers_flops(values)

    def _teachers_flops(self, values: dict[str, float]) -> float:
        if not self.program.teacher:
            return 0
        teacher = self.program.teacher.config
        macs = teacher.attention_macs(values["attention_pairs"], values["tokens"])
        return forward_flops(teacher.parameters_per_token(), values["tokens"], macs)

    def _last_good(self) -> str:
        latest = self.checkpoints.latest()
        if latest is None:
            return "There is no checkpoint yet."
        return f"The last good checkpoint is {self.checkpoints.directory / str(latest)}."


def _rates(rates: Rates) -> dict[str, float]:
    values = {
        "tokens_per_second": rates.tokens_per_second,
        "model_flops_per_second": rates.flops_per_second,
        "step_seconds": rates.step_seconds,
    }
    return values | ({"mfu": rates.mfu} if rates.mfu is not None else {})
