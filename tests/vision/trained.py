"""Packed rows of prompts with images, as runs are given them."""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from shardlm.vision.axes import axes_of
from shardlm.vision.picture import Picture
from shardlm.vision.sight import Sight


@dataclasses.dataclass(frozen=True)
class At:
    """An image of a batch."""

    row: int
    takes: np.ndarray
    own: Picture
    same: Hashable = None

    @property
    def patches(self) -> int:
        return self.own.patches

    def picture(self) -> Picture:
        return self.own


def packed(sight: Sight, asks: Sequence[tuple], rows: Sequence[Sequence[int]], seq_len: int) -> tuple[dict, list[At]]:
    """A batch whose row r holds the documents of these numbers, each a prompt with its images, and where images are."""
    shape, images = (len(rows), seq_len), []
    batch = {n: np.zeros(shape, np.int32) for n in ("tokens", "targets", "segment_ids", "positions")}
    batch["loss_mask"], turns = np.zeros(shape, np.float32), np.zeros((*shape, 3), np.int32)
    for row, documents in enumerate(rows):
        start = 0
        for segment, number in enumerate(documents):
            ids, own = asks[number]
            ids, placed = sight.expanded(ids, [sight.prepare(image) for image in own])
            at = slice(start, start + len(ids) - 1)
            batch["tokens"][row, at], batch["targets"][row, at] = ids[:-1], ids[1:]
            batch["segment_ids"][row, at] = segment + 1
            batch["positions"][row, at] = np.arange(len(ids) - 1)
            batch["loss_mask"][row, at] = 1
            if sight.axes:
                turns[row, at] = axes_of(len(ids), placed)[0].T[:-1]
            images += [At(row, start + one.takes, one.picture) for one in placed]
            start += len(ids) - 1
    return batch | ({"turns": turns} if sight.axes else {}), images
