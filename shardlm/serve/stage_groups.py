"""How rows that decode go through pipeline stages: in groups, whose steps alternate, so that a stage runs the others
while a group's token is on its way."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.serve.carry import Carry
from shardlm.serve.followers import told
from shardlm.serve.launcher import Later, Launcher
from shardlm.serve.speculation.proposer import Proposer
from shardlm.serve.stage_programs import StageRows
from shardlm.serve.stages import Stage


@dataclasses.dataclass
class Group:
    """Rows whose steps run as one.

    size      of the programs
    rows      what describes them, on each stage's devices
    entering  what enters the first stage next, or the stage after the one whose start was last asked for
    held      the slots of the rows, first, and what was sampled so far; for the last stage's launcher alone
    """

    size: int
    rows: list[StageRows | None]
    entering: Later | None = None
    held: tuple = ()


class Groups:
    """The part of staged_runner.StagedRunner."""

    stages: tuple[Stage, ...]
    proposer: Proposer | None
    _state: list[Any]
    _programs: Mapping[Any, Callable]
    _launchers: Sequence[Launcher]
    _carries: Sequence[Carry]
    _here: Sequence[bool]
    _fed: Mapping[tuple, tuple]
    _steps: Sequence[Sequence[Any]]

    _on: Callable[[int, Any], Any]  # these two are staged_runner.StagedRunner's methods
    _own: Callable[[int], Any]
    _drafting: Any

    @told
    def _in_turn(self, rows: Sequence[StageRows], steps: int) -> list[Later]:
        """Groups of rows, whose steps alternate: what each holds after the last one."""
        groups, stages = [self._begun(own) for own in rows], len(self.stages)
        turn = max(len(groups), stages)  # ticks from a group's step to its next
        for tick in range((steps - 1) * turn + len(groups) + stages - 1):
            now = [(s, *divmod(tick - s, turn)) for s in range(min(stages, tick + 1))]
            now = [(s, i, groups[g]) for s, i, g in now if i < steps and g < len(groups)]
            # Between processes what is sent waits for who takes it: first all of it, or a group's would wait for the
            # program of another.
            for s, _, group in now:
                group.entering = self._launchers[s].submit(functools.partial(self._arrive, s, group, group.entering))
            for s, i, group in now:
                # Where drafts are made, steps count down to the last one, which makes none.
                step = functools.partial(self._step_of, s, group, group.entering, steps - 1 - i if self.proposer else i)
                group.entering = self._launchers[s].submit(step)
        return [self._launchers[-1].submit(functools.partial(self._ended, group)) for group in groups]

    def _ended(self, group: Group) -> tuple:
        if not self._here[-1]:
            return ()
        end = self._programs["end", group.size, len(self.stages) - 1]
        self._keep(end((), self._kept, group.rows[-1], group.held[0]))
        return group.held

    @property
    def _kept(self) -> tuple:
        """What the last stage keeps of requests."""
        return self._state[-1].slots, self._state[-1].drafts

    def _keep(self, kept: tuple) -> None:
        self._state[-1] = dataclasses.replace(self._state[-1], slots=kept[0], drafts=kept[1])

    def _begun(self, rows: StageRows) -> Group:
        here = [self._on(s, rows) for s in range(len(self.stages))]
        group = Group(len(rows.where), here)

        def call() -> tuple | None:
            if not self._here[-1]:
                return None
            begin = self._programs["begin", group.size, len(self.stages) - 1]
            kept, group.held, entering = begin(self._drafting, self._kept, here[-1])
            self._keep(kept)
            return entering

        group.entering = self._launchers[-1].submit(call)
        return group

    def _arrive(self, s: int, group: Group, before: Later) -> tuple | None:
        """What enters a stage, on its devices."""
        return self._carries[s](before.result(), self._fed[group.size, s])

    def _step_of(self, s: int, group: Group, arrived: Later, i: int) -> tuple | None:
        """Of one stage: what enters the next one, or the first one at the next step."""
        if not self._here[s]:
            return None
        weights, rest = self._own(s), (group.rows[s], arrived.result(), self._steps[s][i])
        run, state = self._programs["step", group.size, s], self._state[s]
        if not self.stages[s].last:
            self._state[s], leaving = run(weights, state, *rest)
            return leaving
        (pages, drafts, group.held), leaving = run(weights, (state.pages, state.drafts, group.held), *rest)
        self._state[s] = dataclasses.replace(state, pages=pages, drafts=drafts)
        return leaving
