"""Runs batches so that a request's tokens and log-probabilities are the same bits alone, in any batch, in any order of
arrival, with its prefix cached or not, preempted or not: every token is a row of one program, which has one shape.

What that costs: a step is as wide as there may be requests, however few there are, and each token of a prompt gathers
its past for itself. Layers of linear attention take tokens in one after the other (ops/delta_rows.py), which is a few
small kernels for each token and layer, while all else of a step is done for all tokens at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardlm.ops.batch_sampling import Sampled
from shardlm.serve import token_rows
from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.image_rows import image_tokens
from shardlm.serve.inputs import fill_pages, one, sampling
from shardlm.serve.launcher import Later
from shardlm.serve.programs import Scores
from shardlm.serve.runner import Runner
from shardlm.serve.settings import RequestSettings
from shardlm.serve.token_rows import TokenRows


@dataclasses.dataclass(frozen=True)
class Token:
    """One row of the program: of which row of the batch, and where in its chunk (0 where it decodes)."""

    row: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Call:
    """The program under way once: its rows, and what it gives: what they sample, their scores, and what the model makes
    of them."""

    tokens: tuple[Token, ...]
    made: Later

    @property
    def sampled(self) -> Sampled:
        return self.made.result()[0]

    @property
    def scores(self) -> Scores:
        return self.made.result()[1]

    @property
    def hidden(self) -> jax.Array:
        return self.made.result()[2]


@dataclasses.dataclass(frozen=True)
class Started:
    """A batch under way; as runner.Started."""

    batch: ScheduledBatch
    calls: tuple[Call, ...]

    def sampled(self) -> Sampled:
        """Waits; numpy arrays [rows of the batch, steps of the batch, ...]."""
        host = [jax.tree.map(np.asarray, call.sampled) for call in self.calls]
        found = [self._places[n, _last(row)] for n, row in enumerate(self.batch.rows)]
        steps = self.batch.steps
        return jax.tree.map(lambda *all: np.stack([all[call][place, :steps] for call, place in found]), *host)

    def scores(self, row: int) -> Scores:
        """Of one chunk of the batch, by its row: numpy arrays [tokens of the chunk, ...]."""
        places = [self._places[row, offset] for offset in range(len(self.batch.rows[row].tokens))]
        host = [jax.tree.map(np.asarray, call.scores) for call in self.calls]
        return jax.tree.map(lambda *all: np.stack([all[call][place] for call, place in places]), *host)

    def hidden(self, row: int) -> np.ndarray:
        """Of one chunk of the batch: float32 [D] of its last token."""
        call, place = self._places[row, _last(self.batch.rows[row])]
        return np.asarray(self.calls[call].hidden)[place]

    @functools.cached_property
    def _places(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(row of the batch, offset) -> (call, row of the program)."""
        return {(t.row, t.offset): (n, i) for n, call in enumerate(self.calls) for i, t in enumerate(call.tokens)}


class DeterministicRunner(Runner):
    """As Runner, with one program for all tokens."""

    def _own_shapes(self) -> dict[Any, tuple[Callable, tuple]]:
        run = functools.partial(token_rows.run, self.model, self.config.layout, self.config.decode_steps)
        return {"tokens": (run, (self._rows(), np.int32(1)))}

    def _edits(self) -> dict[Any, tuple[Callable, tuple]]:
        settings = one(0), *sampling((), 1), *self._shift(0)
        return super()._edits() | {"begin": (lambda params, *rest: (token_rows.begin(*rest),), settings)}

    def start(
        self,
        batch: ScheduledBatch,
        settings: Mapping[str, RequestSettings],
        masks: Sequence[tuple[int, np.ndarray]] = (),
    ) -> Started:
        """As Runner.start."""
        self._prepare_all(batch, settings, masks)
        parts = _in_parts(_tokens(batch), self._part)
        described = [self._rows(batch, tokens) for tokens in parts]
        found = self._run_parts(described, batch.steps)
        self._copy(batch.saved)
        return Started(batch, tuple(Call(tokens, made) for tokens, made in zip(parts, found, strict=True)))

    @property
    def _part(self) -> int:
        """Rows of the program."""
        return self.config.max_rows

    def _run_parts(self, parts: Sequence[TokenRows], steps: int) -> Sequence[Later]:
        """(Sampled, Scores, hidden) of each."""
        return [self._run("tokens", rows, np.int32(steps)) for rows in parts]

    def _begin(self, row: Row, settings: RequestSettings) -> None:
        super()._begin(row, settings)
        self._run("begin", one(row.slot), *sampling([settings], 1), *self._shift(row.request.shift))

    def _shift(self, shift: int) -> tuple[np.ndarray, ...]:
        """What `token_rows.begin` takes of where a request's tokens are on three axes."""
        return (one(shift),) if self.image_encoder and self.image_encoder.sight.axes else ()

    def _rows(self, batch: ScheduledBatch | None = None, tokens: Sequence[Token] = ()) -> TokenRows:
        """These tokens of a batch; the rest is padding."""
        images = {}
        if self.image_encoder:
            own = [(batch.rows[token.row], token.offset) for token in tokens]
            images = image_tokens(self.image_encoder.sight, own, self._part)
        return TokenRows(self._where(batch, tokens), **images)

    def _where(self, batch: ScheduledBatch | None = None, tokens: Sequence[Token] = ()) -> np.ndarray:
        """TokenRows.where of these tokens of a batch; the rest is padding."""
        where = self._inputs.padding(self._part, 6)
        where[:, 3] = -1
        for i, token in enumerate(tokens):
            row, pages = batch.rows[token.row], batch.page_table[token.row]
            where[i, :6] = _described(row, token.offset)
            fill_pages(where[i, 6:], pages, row.request)
        return where


def _last(row: Row) -> int:
    """The offset of its last token."""
    return 0 if row.tokens is None else len(row.tokens) - 1


def _tokens(batch: ScheduledBatch) -> Iterable[Token]:
    for n, row in enumerate(batch.rows):
        yield from (Token(n, offset) for offset in range(_last(row) + 1))


def _in_parts(tokens: Iterable[Token], size: int) -> list[tuple[Token, ...]]:
    all = tuple(tokens)
    return [all[first : first + size] for first in range(0, len(all), size)]


def _described(row: Row, offset: int) -> tuple[int, ...]:
    """slot, position, samples, token, target, scored: see TokenRows."""
    if row.tokens is None:
        return row.slot, row.start, row.samples, -1, 0, 0
    position, last = row.start + offset, offset == _last(row)
    following = row.request.tokens[position + 1 : position + 2]
    scored = row.request.params.prompt_logprobs is not None
    return row.slot, position, row.samples * last, row.tokens[offset], (*following, 0)[0], scored
