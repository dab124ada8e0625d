"""One program's work, as the scheduler hands it to the runner, and what comes of it when it has landed."""

import dataclasses
from array import array
from typing import Literal, NamedTuple

import numpy as np

from shardlm.serve.encoder_cache import Look
from shardlm.serve.host_pages import Move
from shardlm.serve.request import Request
from shardlm.serve.snapshots import Copies


class Row(NamedTuple):
    """What one request does in a batch.

    A chunk runs the known `tokens` at positions start, start + 1, ... and samples 1 token after the last of them, or
    0 where more of the prompt follows. A decode has `tokens` None: its first token is the one that its slot sampled
    last, which the host may not have seen yet, and it samples `samples` tokens, one a step. Where drafts are verified
    it samples at most so many, in however many steps that takes and at least one a step; and if the host has not seen
    how many a row before it sampled, its first position is `start` or later, and it stops at `end`.
    """

    request: Request
    slot: int
    start: int  # the first position whose keys and values it writes
    end: int  # one past the last that it may write
    samples: int
    tokens: array | None
    fresh: bool  # the first row of this request in this slot: the slot's state on the device starts anew
    again: bool = False  # a decode from the tokens that are known: what the slot sampled after them is dropped
    seen: np.ndarray | None = None  # of a chunk with images, int32 [tokens]: where vectors are (encoder_cache.py)


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """`mixed`: one step of decodes (first) and chunks under the token budget. `decode`: `steps` steps of decodes only;
    a row that has its `samples` idles for the rest, writing nowhere.

    Batches must run on the device in the order of `number`: then pages and slots are given on at once. Within a batch
    a layer writes the keys and values of all rows before any row attends: a row may share a page with a row before it
    that writes it. A batch may have a row of a request that ends before it lands: what it samples is dropped.
    """

    kind: Literal["mixed", "decode"]
    number: int
    steps: int
    rows: tuple[Row, ...]
    # int32 [rows, groups of layers, pages of the longest row], 0 (scrap) beyond a row's pages and behind a window
    page_table: np.ndarray
    # Of what layers without pages remember, before and after the batch's programs.
    restored: Copies = ()
    saved: Copies = ()
    # Of pages, to the host's memory and back, before all else.
    moves: tuple[Move, ...] = ()
    # Images that are read after that, before the batch's programs.
    looks: tuple[Look, ...] = ()

    @property
    def width(self) -> int:
        """The most tokens that a row samples."""
        return max(row.samples for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Tokens that the program runs at most, those of idle steps not counted."""
        return sum(row.samples if row.tokens is None else len(row.tokens) for row in self.rows)


class Landed(NamedTuple):
    """What a row brought. `tokens` are already the last of `request.tokens`; the request may have ended with them."""

    request: Request
    row: int  # of the batch
    tokens: list[int]
