"""A batch that was handed to the devices: what its programs give, for whoever waits for it."""

import dataclasses

import jax
import numpy as np

from shardlm.ops.batch_sampling import Sampled
from shardlm.serve.batch import ScheduledBatch
from shardlm.serve.launcher import Later
from shardlm.serve.programs import Scores
from shardlm.serve.speculation.programs import Tally


@dataclasses.dataclass(frozen=True)
class Call:
    """One program under way: the batch's rows in it, and what it gives: what it samples and, of chunks, the scores of
    their tokens and what the model makes of the last one; of drafts, what came of them."""

    rows: tuple[int, ...]
    made: Later
    chunk: bool

    @property
    def sampled(self) -> Sampled:
        return self.made.result()[0]

    @property
    def scores(self) -> Scores | None:
        return self.made.result()[1] if self.chunk else None

    @property
    def hidden(self) -> jax.Array | None:
        return self.made.result()[2] if self.chunk else None

    @property
    def tally(self) -> Tally | None:
        found = self.made.result()
        return None if self.chunk or len(found) == 1 else found[1]


@dataclasses.dataclass(frozen=True)
class Started:
    """A batch under way."""

    batch: ScheduledBatch
    calls: tuple[Call, ...]

    def sampled(self) -> Sampled:
        """Waits; numpy arrays [rows of the batch, width of the batch, ...]."""
        rows, width = len(self.batch.rows), self.batch.width
        found = []
        for call in self.calls:
            host = jax.tree.map(np.asarray, call.sampled)
            # Of a chunk: one step.
            found.append(jax.tree.map(lambda a: a[:, None], host) if call.chunk else host)
        whole = jax.tree.map(lambda a: np.zeros((rows, width, *a.shape[2:]), a.dtype), found[0])
        for call, host in zip(self.calls, found, strict=True):
            for all_rows, own in zip(jax.tree.leaves(whole), jax.tree.leaves(host), strict=True):
                all_rows[list(call.rows), : own.shape[1]] = own[: len(call.rows), :width]
        return whole

    def tally(self) -> Tally | None:
        """Waits; numpy arrays of the rows of the batch whose drafts were verified, which are its first."""
        calls = [call for call in self.calls if call.tally is not None]
        if not calls:
            return None
        order = np.argsort([row for call in calls for row in call.rows])
        counts = [len(call.rows) for call in calls]

        def joined(*parts: jax.Array) -> np.ndarray:
            return np.concatenate([np.asarray(a)[:count] for a, count in zip(parts, counts, strict=True)])[order]

        return jax.tree.map(joined, *(call.tally for call in calls))

    def scores(self, row: int) -> Scores:
        """Of one chunk of the batch, by its row: numpy arrays [tokens of the chunk, ...]."""
        call = self._call_of(row)
        place, count = call.rows.index(row), len(self.batch.rows[row].tokens)
        return jax.tree.map(lambda a: np.asarray(a)[place, :count], call.scores)

    def hidden(self, row: int) -> np.ndarray:
        """Of one chunk of the batch: float32 [D] of its last token."""
        call = self._call_of(row)
        return np.asarray(call.hidden)[call.rows.index(row)]

    def _call_of(self, row: int) -> Call:
        return next(call for call in self.calls if row in call.rows)
