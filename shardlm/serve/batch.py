"""One program's work, as the scheduler hands it to the runner."""

import dataclasses
from array import array
from typing import Literal, NamedTuple

import numpy as np

from shardlm.serve.request import Request


class Row(NamedTuple):
    """What one request does in a batch.

    A chunk runs the known `tokens` at positions start, start + 1, ... and samples 1 token after the last of them, or
    0 where more of the prompt follows. A decode has `tokens` None: its first token is the one that its slot sampled
    last, which the host may not have seen yet, and it samples up to `samples` tokens, one a step.
    """

    request: Request
    slot: int
    start: int  # of a decode: an upper bound where programs may sample less than they were asked for
    num_tokens: int  # positions whose keys and values it writes, at most
    samples: int
    tokens: array | None
    fresh: bool  # the first row of this request in this slot: the slot's state on the device starts anew


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """`mixed`: one step of decodes (first) and chunks under the token budget. `decode`: `steps` steps of decodes only;
    a row with fewer `samples` than steps idles for the rest.

    Batches must run on the device in the order of `number`, and a program must have written its keys and values
    before anything of a later batch reads or writes a page: then pages and slots are given on at once. A batch may
    still have a row of a request that has ended meanwhile: what it samples is dropped.
    """

    kind: Literal["mixed", "decode"]
    number: int
    steps: int
    rows: tuple[Row, ...]
    page_table: np.ndarray  # int32 [rows, pages of the longest row], 0 (scrap) beyond a row's pages

    @property
    def num_tokens(self) -> int:
        """Tokens that the program runs: what counts against the budget."""
        return sum(row.num_tokens for row in self.rows)
