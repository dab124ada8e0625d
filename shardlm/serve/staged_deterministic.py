"""The deterministic mode over pipeline stages: each stage has one program of one shape for all tokens, whose rows are
dealt into groups as those that decode are (staged_runner.py)."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.serve import stage_programs, stage_rows
from shardlm.serve.batch import ScheduledBatch
from shardlm.serve.deterministic import DeterministicRunner, Token
from shardlm.serve.image_rows import shifts
from shardlm.serve.launcher import Later, Part
from shardlm.serve.stage_programs import StageRows
from shardlm.serve.staged_runner import StagedRunner


class StagedDeterministicRunner(DeterministicRunner, StagedRunner):
    """As both."""

    def _shapes(self) -> Mapping[Any, tuple[Callable, tuple]]:
        begin = functools.partial(stage_rows.begin, self.config.decode_steps, self.model.config.embed_dim)
        steps = stage_programs.Steps(begin, stage_rows.step, stage_rows.last_step, stage_rows.end)
        work = self._edits_of_last() | self._writers() | self._copiers() | self._movers() | self._looks()
        work |= self._step_shapes(steps, self._rows())
        return {key: one for key, one in work.items() if self._here[key[-1]]}

    @property
    def _part(self) -> int:
        return -(-self.config.max_rows // len(self.stages))

    def _rows(self, batch: ScheduledBatch | None = None, tokens: Sequence[Token] = ()) -> StageRows:
        own = super()._rows(batch, tokens)
        sight = self.image_encoder and self.image_encoder.sight
        shift = shifts(sight, [batch.rows[token.row] for token in tokens], self._part)
        return StageRows(own.where, own.seen, own.turns, **shift)

    def _run_parts(self, parts: Sequence[StageRows], steps: int) -> list[Later]:
        return [Part(held, _said) for held in self._in_turn(parts, steps)]


def _said(held: tuple) -> tuple:
    _, said = held
    return said.found, said.scores, said.first
