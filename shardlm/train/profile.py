"""Profiles some steps of a training run: traces them, and says where their time went. What a trace means is
shardlm/profile's."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardlm import hardware
from shardlm.errors import ShardlmError
from shardlm.hlo.flops import matmul_flops
from shardlm.hlo.labels import Labels
from shardlm.profile import trace
from shardlm.profile.device_time import device_times
from shardlm.profile.report import Profile, table
from shardlm.train.program import Program


@dataclasses.dataclass(frozen=True)
class ProfileSteps:
    """Steps first to last, both included, as the loop counts them: from 1. `predicted` are seconds of a step by row of
    hlo/rows.py, to be shown beside what is measured."""

    first: int
    last: int
    predicted: Mapping[str, float] | None = None

    @classmethod
    def parse(cls, text: str) -> "ProfileSteps":
        """Of "FIRST:END", which are the steps FIRST to END - 1. Raises ShardlmError for anything else."""
        match = re.fullmatch(r"(\d+):(\d+)", text)
        if not match or not 1 <= int(match[1]) < int(match[2]):
            raise ShardlmError(
                f"--profile_steps={text} names no steps: it takes FIRST:END with 1 <= FIRST < END, "
                "and --profile_steps=10:15 profiles steps 10 to 14"
            )
        return cls(int(match[1]), int(match[2]) - 1)

    def check(self, steps: int) -> None:
        """Raises ShardlmError for what lies behind the end of a run of `steps`."""
        if self.last > steps:
            raise ShardlmError(
                f"--profile_steps={self} ends after the run: train.steps={steps}; profile earlier steps or set "
                f"--config.train.steps to at least {self.last}"
            )

    def passed(self, done: int) -> str:
        """What to say where a run that resumes after `done` steps has begun these, so that they are not profiled; ""
        where all are to come. No error: a scheduler starts a run again by the command that began it."""
        if self.first > done:
            return ""
        return (
            f"warning: --profile_steps={self} begins before the run, which resumes after step {done}: nothing is "
            f"profiled; to profile steps, name some from {done + 1} on"
        )

    def __str__(self) -> str:
        return f"{self.first}:{self.last + 1}"


class Profiler:
    """Starts and stops the trace as the loop goes by, each process for its own devices in its own folder.

    steps     which to profile; None for none
    texts     gives the compiled programs of a step by name, "step" among them, each `Compiled.as_text()`; called once
              the trace is written
    """

    def __init__(self, steps: ProfileSteps | None, program: Program, texts: Callable[[], Mapping[str, str]]):
        self._steps, self._program, self._texts = steps, program, texts
        self._folder = pathlib.Path(program.config.run_dir) / "profile" / f"process_{jax.process_index()}"
        self._seconds: dict[int, float] = {}
        self._tracing = False

    def is_edge(self, step: int) -> bool:
        """Whether the devices must be waited for after this step, since the trace starts or stops there."""
        return self._steps is not None and step in (self._steps.first - 1, self._steps.last)

    def reached(self, step: int, state: Any) -> str:
        """Call when `step` steps are done, `state` is their result and nothing else is under way. What there is to say
        to the user; mostly ""."""
        if not self.is_edge(step):
            return ""
        jax.block_until_ready(state)  # of all devices: a loss that can be read is that of one
        if step < self._steps.first:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # millions of Python calls, which hide the rest
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            self._tracing = True
            return ""
        self._stop()
        return self._report()

    def timed(self, step: int, seconds: float) -> None:
        """How long a step took by the host's clock."""
        if self._tracing:
            self._seconds[step] = seconds

    def close(self) -> str:
        """Ends a trace that a run leaves under way when it stops early."""
        if not self._tracing:
            return ""
        self._stop()
        return f"profile: the run ended before step {self._steps.last} was done; {_where(self._folder)}"

    def _stop(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()

    def _report(self) -> str:
        """Writes profile.json beside the trace; returns the table, of the first process."""
        written = trace.find(self._folder)
        mesh = self._program.rules.mesh.sizes()
        texts = self._texts()
        programs = {name: Labels(text, mesh) for name, text in texts.items()}
        events = trace.read(jax.profiler.ProfileData.from_file(str(written)))
        times = device_times(events, list(programs.values()), len(self._seconds))
        if not times:
            return f"profile: nothing of the step is in the trace; {_where(self._folder)}"
        gpu = hardware.lookup(jax.local_devices()[0].device_kind)
        peak = gpu and gpu.peak.of(self._program.config.precision)
        steps, seconds = self._steps, list(self._seconds.values())
        flops, uncounted = programs["step"].flops(), matmul_flops(texts["step"]).uncounted
        profile = Profile(steps.first, steps.last, seconds, times, flops, uncounted, peak)
        (written.parent / "profile.json").write_text(json.dumps(profile.to_json(), indent=1) + "\n")
        return f"{table(profile, steps.predicted)}\n{_where(self._folder)}"


def _where(folder: pathlib.Path) -> str:
    latest = trace.find(folder).parent
    return (
        f"trace: {latest}: drop perfetto_trace.json.gz on https://ui.perfetto.dev, or pip install xprof and "
        f"xprof --logdir={folder}"
    )
