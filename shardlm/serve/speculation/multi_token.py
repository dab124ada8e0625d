"""Drafts from the model's own modules that predict further tokens (layers/mtp.py; DeepSeek V3,
https://arxiv.org/abs/2412.19437, section 2.2), with the model's parameters and, for their keys and values, pages of
their own under the numbers of the model's pages.

At position p module k, from 0, takes what module k - 1 made there (module 0: the model's hidden state) and token
p + k + 1, and predicts the token after that one. Token q thus goes into module k at position q - 1 - k, beside what was
made of earlier tokens: a slot keeps that for the next token. Drafts beyond the last module are that module's once more,
of its own output.

What a module keeps of a position depends on tokens after it. So the entries of a shared page's last positions may be of
another request's next tokens, and the first pairs after a prefix that was found in the cache are skipped: what was made
of the tokens before them is not kept. Drafts are only worse for that and never wrong, as the model verifies them.

Drafts are sampled as draft_model.py's are, with the noise that the model will sample with."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from shardlm.generate import make_pages
from shardlm.layers.context import Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.models.transformer import Transformer
from shardlm.serve.programs import WHOLE, sampled_of
from shardlm.serve.speculation.proposer import Rows
from shardlm.serve.state import Slots
from shardlm.state import ModelDef


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """pages of the modules' keys and values; and of each slot, and of the one for padding:

    hidden  [modules, S + 1, D], what each module takes with the next token
    first   int32 [S + 1], the position from which on the request in it was read and not found in the cache
    """

    pages: Pages
    hidden: jax.Array
    first: jax.Array


@dataclasses.dataclass(frozen=True)
class MultiTokenProposer:
    """Its parameters are the model's; `lm` puts what of it has the modules, the embedding and the head together with
    them, inside jit. max_rows: S, the slots."""

    remembers: ClassVar[bool] = False
    reads_text: ClassVar[bool] = False
    drafts: int
    model: ModelDef
    lm: Callable[[Any], Transformer]
    layout: PageLayout
    page_size: int
    max_rows: int

    @property
    def modules(self) -> int:
        return self.model.config.mtp.depth

    def empty(self):
        rows, width = self.max_rows + 1, self.model.config.embed_dim
        hidden = jnp.zeros((self.modules, rows, width), self.model.execution.dtype)
        return State(make_pages(self.model, self.layout, self.page_size), hidden, jnp.zeros(rows, jnp.int32))

    def pages(self, state):
        return state.pages

    def with_pages(self, state, pages):
        return dataclasses.replace(state, pages=pages)

    def begin(self, state, slot, tokens):
        return state

    def read(self, params, state, chunk):
        first = jnp.where(chunk.fresh, chunk.positions[:, 0], state.first[chunk.slot])
        lm = self.lm(params)
        known, hidden = state.hidden[:, chunk.slot], self.taken(lm, chunk.hidden)
        read = _Read(chunk.ctx.page_table, chunk.tokens, chunk.positions, chunk.ctx.valid, first)
        made, pages = self._fed(lm, state.pages, known, _after(known[0], hidden), read)
        last = jnp.maximum(jnp.sum(chunk.ctx.valid, axis=1) - 1, 0)
        known = jnp.stack([_at(a, last) for a in (hidden, *made[:-1])])
        return State(pages, state.hidden.at[:, chunk.slot].set(known), state.first.at[chunk.slot].set(first))

    def propose(self, params, state, rows):
        """Pass i takes the token i places after the last one, from 0; the first is made also where nothing is drafted,
        as no later one writes its keys and values."""
        lm, last = self.lm(params), jnp.minimum(self.drafts, rows.room - 1)
        passes = jnp.where(rows.room > 0, jnp.maximum(last, 1), 0)
        first, inputs = state.first[rows.slot], list(state.hidden[:, rows.slot][:, :, None])

        def one(i, modules: range, pages: Pages, inputs: list[jax.Array], own: Slots, found: jax.Array):
            """The pass through those modules that have their input; the foremost drafts."""
            active, made = i < passes, []
            read = _Read(rows.table, own.last[:, None], (rows.position + i)[:, None], active[:, None], first)
            for module, x in zip(modules, inputs, strict=True):
                x, pages = self._module(lm, module, pages, x, read)
                made.append(x)
            sampled, own = sampled_of(self.logits(lm, made[0], modules[0]), own, rows.position + i + 1, active)
            return pages, [jax.reshard(x, WHOLE) for x in made], own, found.at[:, i].set(sampled.token, mode="drop")

        pages, own = state.pages, dataclasses.replace(rows.own, told=jnp.zeros_like(rows.own.told))
        found, hidden = jnp.zeros((rows.slot.shape[0], self.drafts), jnp.int32), state.hidden
        for i in range(self.modules - 1):
            pages, made, own, found = one(i, range(i, self.modules), pages, inputs, own, found)
            inputs = made[:-1]
            if i == 0:  # the last token is known, and drafts are not
                known = jnp.stack([state.hidden[0, rows.slot], *(x[:, 0] for x in inputs)])
                hidden = hidden.at[:, self._kept(rows)].set(known)
        again = range(self.modules - 1, self.modules)
        step = lambda i, carry: one(i, again, *carry)  # noqa: E731
        pages, *_, found = jax.lax.fori_loop(again.start, jnp.max(passes), step, (pages, inputs, own, found))
        return found, jnp.maximum(last, 0), dataclasses.replace(state, pages=pages, hidden=hidden)

    def observe(self, params, state, rows, tokens, accepted, hidden):
        """Of drafts that stay, what the modules keep is made anew of the model's hidden states."""
        lm = self.lm(params)
        known, hidden = state.hidden[:, rows.slot], self.taken(lm, hidden)
        index = jnp.arange(self.drafts)
        valid = (index < accepted[:, None]) & (rows.room > 0)[:, None]
        last = jnp.maximum(accepted - 1, 0)
        positions = rows.position[:, None] + 1 + jnp.minimum(index, last[:, None])
        read = _Read(rows.table, tokens[:, : self.drafts], positions, valid, state.first[rows.slot])
        made, pages = self._fed(lm, state.pages, known, hidden[:, : self.drafts], read)
        further = [
            jnp.where((accepted > 0)[:, None], _at(a, last), old) for a, old in zip(made[:-1], known[1:], strict=True)
        ]
        known = jnp.stack([_at(hidden, accepted), *further])
        return dataclasses.replace(state, pages=pages, hidden=state.hidden.at[:, self._kept(rows)].set(known))

    def _kept(self, rows: Rows) -> jax.Array:
        """Where rows keep their hidden states, int32 [B]; idle ones with padding."""
        return jnp.where(rows.room > 0, rows.slot, self.max_rows)

    def _fed(
        self, lm: Transformer, pages: Pages, known: jax.Array, x: jax.Array, read: "_Read"
    ) -> tuple[list[jax.Array], Pages]:
        """Known tokens go through all modules: known [modules, B, D] is what each takes with the first of them, and
        x [B, T, D] what module 0 takes with each. Returns (what each module made of them [B, T, D], pages)."""
        made: list[jax.Array] = []
        for module in range(self.modules):
            x = _after(known[module], made[-1]) if module else x
            x, pages = self._module(lm, module, pages, x, read)
            made.append(jax.reshard(x, WHOLE))
        return made, pages

    def _module(self, lm: Transformer, module: int, pages: Pages, x: jax.Array, read: "_Read"):
        """One module over x [B, T, D] and the tokens it takes with that: (what it makes of them [B, T, D], pages)."""
        positions = read.positions - 1 - module
        valid = read.valid & (positions >= read.first[:, None])
        ctx = Paged.make(read.table, valid, self.layout, self.model.execution)
        x = jax.reshard(x, self.model.execution.rules.act.spec("batch", "seq", "embed"))
        return self.run(lm, module, pages, x, read.tokens, jnp.maximum(positions, 0), ctx)

    # What is a module's, and otherwise in eagle.py.

    def taken(self, lm: Transformer, hidden: jax.Array) -> jax.Array:
        """What module 0 takes [B, T, D], whole on every device, of what the model hands out of each token."""
        return jax.reshard(hidden, WHOLE)

    def logits(self, lm: Transformer, made: jax.Array, module: int) -> jax.Array:
        """float32 [B, V], whole on every device, of what a module makes of one token [B, 1, D]."""
        return jax.reshard(lm.logits_of_next(made, module)[:, 0], WHOLE)

    def run(self, lm: Transformer, module: int, pages: Pages, x: jax.Array, tokens, positions, ctx: Paged):
        """(what a module makes of x [B, T, D], pages)."""
        return lm.predict_next(x, tokens, positions, ctx, pages, module, layer=module)


@dataclasses.dataclass(frozen=True)
class _Read:
    """Tokens that modules take: table int32 [B, W]; tokens, positions, valid [B, T]; first int32 [B], before which no
    position has what it was made of."""

    table: jax.Array
    tokens: jax.Array
    positions: jax.Array
    valid: jax.Array
    first: jax.Array


def _after(before: jax.Array, made: jax.Array) -> jax.Array:
    """made [B, T, D] one place later: its last is dropped, and before [B, D] stands first."""
    return jnp.concatenate([before[:, None], made[:, :-1]], axis=1)


def _at(made: jax.Array, index: jax.Array) -> jax.Array:
    """made [B, T, D] at index int32 [B] -> [B, D]."""
    return jnp.take_along_axis(made, index[:, None, None], axis=1)[:, 0]
