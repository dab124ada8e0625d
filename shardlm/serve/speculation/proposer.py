"""What proposes drafts: the interface between the programs that verify them (programs.py) and the ways to find them."""

import dataclasses
from typing import Any, Protocol

import jax

from shardlm.layers.context import Pages
from shardlm.serve.programs import Chunk
from shardlm.serve.state import Slots

Tree = Any


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows about to be verified, B of them.

    slot      int32 [B]
    table     int32 [B, W], their pages: a proposer's own layers have pages of the same numbers
    position  int32 [B], of the last token, `own.last`
    room      int32 [B], the most tokens that they may still sample: so many less one are drafted at most; 0: idle
    own       what is kept of their slots
    adapter   int32 [B] (layers/lora.py)
    """

    slot: jax.Array
    table: jax.Array
    position: jax.Array
    room: jax.Array
    own: Slots
    adapter: jax.Array


class Proposer(Protocol):
    """Pure functions within the programs. `state` is the proposer's own on the device, donated to every program.

    drafts      tokens proposed for each step, K
    reads_text  whether `begin` wants the tokens of each request that gets a slot
    remembers   whether its layers remember texts in slots, as those of the model do (layers/context.py, MEMORIES)
    """

    drafts: int
    reads_text: bool
    remembers: bool

    def empty(self) -> Tree:
        """The state before the first request; inside jit, under the mesh."""

    def begin(self, state: Tree, slot: jax.Array, tokens: jax.Array) -> Tree:
        """The known tokens, int32 [1, max_model_len], of the request that has got a slot, int32 [1]."""

    def read(self, params: Tree, state: Tree, chunk: Chunk) -> Tree:
        """After the model has read chunks, which are pages' contents for the proposer as well."""

    def propose(self, params: Tree, state: Tree, rows: Rows) -> tuple[jax.Array, jax.Array, Tree]:
        """(drafts int32 [B, K], how many of each row count int32 [B], state)."""

    def observe(
        self, params: Tree, state: Tree, rows: Rows, tokens: jax.Array, accepted: jax.Array, hidden: jax.Array
    ) -> Tree:
        """After verification of `rows`: tokens int32 [B, 1 + K] followed the last one, of which 1 + accepted [B] count;
        hidden [B, 1 + K, D] is the model's of the last token and of the drafts, or the streams that it hands out."""

    def pages(self, state: Tree) -> Pages:
        """What of it are pages; {} where there are none."""

    def with_pages(self, state: Tree, pages: Pages) -> Tree:
        """With these in their place."""

    def copied(self, state: Tree, pairs: jax.Array) -> Tree:
        """With what its layers remember copied from slots to slots, int32 [n, 2], where they do (memory_copies.py)."""
