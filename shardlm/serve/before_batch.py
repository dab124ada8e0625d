"""What a runner does before a batch's own programs: pages and memories come to their places, images are read, and slots
are told who has them now."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shardlm.serve.batch import Row, ScheduledBatch
from shardlm.serve.host_pages import Move
from shardlm.serve.image_encoder import ImageEncoder
from shardlm.serve.image_rows import look_inputs
from shardlm.serve.inputs import Inputs, one
from shardlm.serve.launcher import Later
from shardlm.serve.settings import RequestSettings
from shardlm.serve.snapshots import Copies
from shardlm.serve.speculation.proposer import Proposer


class BeforeBatch:
    """The part of runner.Runner."""

    image_encoder: ImageEncoder | None
    proposer: Proposer | None
    _inputs: Inputs
    _masked: set[int]  # slots whose masks are not all ones

    _run: Callable[..., Later]  # these three are runner.Runner's methods
    _move: Callable[[Sequence[Move]], None]
    _copy: Callable[[Copies], None]

    def _prepare_all(
        self,
        batch: ScheduledBatch,
        settings: Mapping[str, RequestSettings],
        masks: Sequence[tuple[int, np.ndarray]],
    ) -> None:
        """What comes before a batch's own programs; arguments as of `start`."""
        self._move(batch.moves)
        self._copy(batch.restored)
        for look in batch.looks:
            size = self.image_encoder.size_of(look.picture.patches)
            self._run(("look", size), *look_inputs(self.image_encoder.sight, look, size))
        for row in batch.rows:
            self._prepare(row, settings[row.request.id])
        self._allow(masks)

    def _prepare(self, row: Row, settings: RequestSettings) -> None:
        """Makes a slot know what the row goes on from, where that is not what it sampled last."""
        if row.fresh:
            self._begin(row, settings)
        if row.again:
            self._count(row, settings)
            last = (row.slot, row.request.tokens[-1], len(row.request.tokens) - 1)
            self._run("last", *map(one, last))

    def _count(self, row: Row, settings: RequestSettings) -> None:
        """What the request in a slot has said, where that matters: all that is known, as the row may be the first of
        several chunks in which it is computed anew."""
        if not settings.penalised:
            return
        tokens, prompt_len = row.request.tokens, row.request.prompt_len
        self._run("counts", *self._inputs.counts(row.slot, tokens[:prompt_len], tokens[prompt_len:]))

    def _begin(self, row: Row, settings: RequestSettings) -> None:
        """Makes a slot forget the request before, as far as the chunk program does not."""
        if row.slot in self._masked:
            self._allow([(row.slot, self._inputs.everything)])
            self._masked.discard(row.slot)
        self._count(row, settings)
        if self.proposer and self.proposer.reads_text:
            self._run("text", *self._inputs.text(row.slot, row.request.tokens))

    def _allow(self, masks: Sequence[tuple[int, np.ndarray]]) -> None:
        for arrays in self._inputs.masks(masks):
            self._run("allowed", *arrays)
        self._masked |= {slot for slot, _ in masks}
