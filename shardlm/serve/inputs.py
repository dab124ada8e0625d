"""What a runner's programs are called with: numpy arrays that the host fills from what was scheduled. With nothing to
fill them from, they are the examples that programs are compiled for."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from shardlm.ops.batch_sampling import Edits, RowSettings
from shardlm.ops.penalties import counts_of
from shardlm.serve.batch import Row
from shardlm.serve.image_rows import image_rows
from shardlm.serve.memory_copies import COPIES
from shardlm.serve.programs import ChunkRows, DecodeRows
from shardlm.serve.request import Request
from shardlm.serve.runner_config import RunnerConfig
from shardlm.serve.settings import RequestSettings
from shardlm.serve.snapshots import Copies
from shardlm.serve.state import no_edits
from shardlm.vision.sight import Sight

MASKS = 8  # rows of grammars' masks that one call sets


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Of one runner. vocab: tokens there are. drafts: whether decoding verifies drafts. sight: of a model that sees."""

    config: RunnerConfig
    vocab: int
    drafts: bool
    sight: Sight | None = None

    def decode_rows(self, rows: Sequence[tuple[Row, np.ndarray]], size: int) -> DecodeRows:
        """Of rows with their part of the page table [groups, width]."""
        where = self.padding(size, 3)
        for i, (row, pages) in enumerate(rows):
            where[i, :3] = row.slot, row.end if self.drafts else row.start, row.samples
            fill_pages(where[i, 3:], pages, row.request)
        return DecodeRows(where)

    def chunk_rows(
        self, rows: Sequence[tuple[Row, np.ndarray, RequestSettings]], size: tuple[int, int], whole: bool = False
    ) -> ChunkRows:
        """The same with the settings of their requests; for a program of the kind `whole` (runner_config.py)."""
        where, tokens, targets = self.padding(size[0], 6), np.zeros(size, np.int32), np.zeros(size, np.int32)
        for i, (row, pages, settings) in enumerate(rows):
            scored = settings.params.prompt_logprobs is not None
            where[i, :6] = row.slot, row.start, len(row.tokens), row.samples, scored, row.fresh
            fill_pages(where[i, 6:], pages, row.request)
            tokens[i, : len(row.tokens)] = row.tokens
            following = row.request.tokens[row.start + 1 : row.end + 1]
            targets[i, : len(following)] = following
        sampled = sampling([settings for _, _, settings in rows], size[0])
        seen = image_rows(self.sight, [row for row, _, _ in rows], size, whole)
        return ChunkRows(where, tokens, targets, *sampled, **seen)

    def padding(self, rows: int, first: int) -> np.ndarray:
        """int32 [rows, first + W + 1], what describes rows, all of them the slot for padding."""
        where = np.zeros((rows, self.config.columns(first)), np.int32)
        where[:, 0] = self.config.max_rows
        return where

    def copies(self, copies: Copies) -> Iterator[np.ndarray]:
        """Pairs of slots int32 [COPIES, 2], of each call in turn."""
        for first in range(0, len(copies), COPIES):
            some = copies[first : first + COPIES]
            pairs = np.full((COPIES, 2), self.config.max_rows, np.int32)
            pairs[: len(some)] = some
            yield pairs

    def masks(self, masks: Sequence[tuple[int, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Slots int32 [MASKS] and what each may say next int32 [MASKS, ceil(V / 32)], of each call in turn."""
        for first in range(0, len(masks), MASKS):
            slots = np.full(MASKS, self.config.max_rows, np.int32)
            allowed = np.full((MASKS, self.words), -1, np.int32)
            for i, (slot, mask) in enumerate(masks[first : first + MASKS]):
                slots[i], allowed[i] = slot, mask
            yield slots, allowed

    @property
    def words(self) -> int:
        """Of a mask, which has a bit for each token."""
        return -(-self.vocab // 32)

    @property
    def everything(self) -> np.ndarray:
        """The mask that allows all tokens."""
        return np.full(self.words, -1, np.int32)

    def counts(self, slot: int, prompt: Sequence[int], reply: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The slot and what its request has said, int32 [1, ceil(V / 32)] and int16 [1, V]."""
        return one(slot), *(a[None] for a in counts_of(prompt, reply, self.vocab))

    def text(self, slot: int, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The slot and its text int32 [1, max_model_len]."""
        text = np.zeros((1, self.config.max_model_len), np.int32)
        text[0, : len(tokens)] = tokens
        return one(slot), text


def sampling(settings: Sequence[RequestSettings], rows: int) -> tuple[RowSettings, Edits, np.ndarray]:
    """How these requests are sampled, the first of so many rows."""
    defaults, edits, told = RowSettings.defaults(rows), no_edits(rows), np.zeros(rows, np.int8)
    for i, own in enumerate(settings):
        own.fill(defaults, edits, told, i)
    return defaults, edits, told


def fill_pages(columns: np.ndarray, pages: np.ndarray, request: Request) -> None:
    """A row's pages [groups, width] and its request's adapter into its last columns, int32 [row_pages + 1]."""
    columns[:-1].reshape(len(pages), -1)[:, : pages.shape[1]] = pages
    columns[-1] = request.adapter


def one(number: int) -> np.ndarray:
    """int32 [1]"""
    return np.array([number], np.int32)
