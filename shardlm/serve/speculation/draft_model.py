"""Drafts from a smaller model of the same vocabulary. Its layers have pages of their own under the numbers of the
model's pages, so that shared prefixes and preemption hold for both.

It samples as the model will: with the request's settings, penalties and bans, and with the same noise, that of
fold_in(seed, position). Where both distributions agree so do the tokens, also above temperature 0 (coupling without
communication, https://arxiv.org/abs/2408.07978)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from shardlm.generate import make_pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.serve.memory_copies import copy_memories
from shardlm.serve.programs import WHOLE, hidden_of_one, sampled_of
from shardlm.state import ModelDef


@dataclasses.dataclass(frozen=True)
class DraftModelProposer:
    """The state is the draft model's pages."""

    reads_text: ClassVar[bool] = False
    drafts: int
    model: ModelDef
    layout: PageLayout
    page_size: int

    @property
    def remembers(self) -> bool:
        return self.layout.memories > 0

    def empty(self):
        return make_pages(self.model, self.layout, self.page_size)

    def begin(self, state, slot, tokens):
        return state

    def read(self, params, state, chunk):
        ctx = Paged.make(chunk.ctx.page_table, chunk.ctx.valid, self.layout, self.model.execution, slot=chunk.slot)
        return self.model.model(params)(chunk.tokens, chunk.positions, ctx, state)[1]

    def propose(self, params, state, rows):
        """One pass more than drafts, for the keys and values of the last one: if it is accepted, the next step begins
        after it."""
        last = jnp.minimum(self.drafts, rows.room - 1)
        own = dataclasses.replace(rows.own, told=jnp.zeros_like(rows.own.told))

        def draft(i, carry: tuple[Any, Any, jax.Array]):
            pages, own, found = carry
            position, active = rows.position + i, i <= last
            where = (pages, rows.table, own.last, position, active, rows.adapter, rows.slot)
            how = {"rows": "drafts", "sure": rows.position}
            lm, hidden, pages = hidden_of_one(self.model, self.layout, params, *where, **how)
            sampled, own = sampled_of(jax.reshard(lm.logits(hidden)[:, 0], WHOLE), own, position + 1, active)
            return pages, own, found.at[:, i].set(sampled.token, mode="drop")

        found = jnp.zeros((rows.slot.shape[0], self.drafts), jnp.int32)
        passes = jnp.maximum(jnp.max(last) + 1, 0)
        pages, _, found = jax.lax.fori_loop(0, passes, draft, (state, own, found))
        return found, jnp.maximum(last, 0), pages

    def observe(self, params, state, rows, tokens, accepted, hidden):
        return state

    def pages(self, state):
        return state

    def with_pages(self, state, pages):
        return pages

    def copied(self, state, pairs):
        return copy_memories(self.layout, self.model.execution.rules, state, pairs)
