"""The programs that serve with drafts. A step of decoding runs the model over the last token and K drafts at once.
Each position is then sampled as ever, with its own key, and a draft stays while it equals what the model itself sampled
there; the first token that differs is the model's, and stays too.

So a reply is the same with and without drafts, whatever proposes them, up to logits that differ in their last bits; and
with them its distribution is the model's (https://arxiv.org/abs/2408.07978, https://arxiv.org/abs/2211.17192). No
probabilities of drafts are needed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlm.layers.context import HANDED, Pages
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.ops.batch_sampling import Sampled
from shardlm.serve import programs
from shardlm.serve.programs import WHOLE, ChunkRows, DecodeRows, keep_slots, none_sampled, sampled_of
from shardlm.serve.speculation.proposer import Proposer, Rows
from shardlm.serve.state import ServeState, Slots, take
from shardlm.state import ModelDef


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tally:
    """What came of drafts, of each row.

    made      int32 [B], tokens sampled, the accepted drafts among them
    steps     int32 [B], steps with drafts
    drafted   int32 [B]
    accepted  int32 [B, K], by place among the drafts of a step
    """

    made: jax.Array
    steps: jax.Array
    drafted: jax.Array
    accepted: jax.Array


class _Carry(NamedTuple):
    step: jax.Array
    pages: Pages
    drafts: Any
    own: Slots
    found: Sampled
    tally: Tally


def chunk(
    model: ModelDef,
    layout: PageLayout,
    proposer: Proposer,
    params: tuple,
    state: ServeState,
    rows: ChunkRows,
    whole: str = "",
    parts: str = "",
):
    """As programs.chunk, and the proposer reads the same. params: (the model's, the proposer's or None: the same)."""
    own, proposers = both(params)
    return programs.chunk(model, layout, own, state, rows, functools.partial(proposer.read, proposers), whole, parts)


def both(params: tuple) -> tuple:
    """The model's parameters and the proposer's, of (the model's, the proposer's or None: the same)."""
    own, proposers = params
    return own, own if proposers is None else proposers


def begin(proposer: Proposer, state: ServeState, slot: jax.Array, tokens: jax.Array) -> ServeState:
    """A request has got a slot, int32 [1], with tokens int32 [1, max_model_len]."""
    return dataclasses.replace(state, drafts=proposer.begin(state.drafts, slot, tokens))


def decode(
    model: ModelDef,
    layout: PageLayout,
    most: int,
    proposer: Proposer,
    params: tuple,
    state: ServeState,
    rows: DecodeRows,
    steps: jax.Array,
):
    """At most `steps` (int32, at most `most`) steps, each of which brings every row one token or more until it has its
    samples or is at its end. Returns (state, Sampled of [B, most * (1 + K), ...], Tally)."""
    own_params, proposers = both(params)
    where, slot, B = rows.where, rows.where[:, 0], rows.where.shape[0]

    def step(carry: _Carry) -> _Carry:
        before = rows_of(where, carry.own, carry.tally)
        fed, count, drafts = proposed(proposer, proposers, carry.drafts, before)
        hidden, logits, pages = _read(model, layout, own_params, carry.pages, before, fed, count)
        out = (carry.found, carry.tally)
        own, drafts, found, tally = verified(proposer, proposers, drafts, before, fed, count, hidden, logits, *out)
        return _Carry(carry.step + 1, pages, drafts, own, found, tally)

    own, (found, tally) = take(state.slots, slot), nothing_yet(proposer, B, most)
    going = lambda carry: (carry.step < steps) & jnp.any(rows_of(where, carry.own, carry.tally).room > 0)  # noqa: E731
    end = jax.lax.while_loop(going, step, _Carry(jnp.int32(0), state.pages, state.drafts, own, found, tally))
    slots = keep_slots(state.slots, slot, end.own)
    return dataclasses.replace(state, pages=end.pages, slots=slots, drafts=end.drafts), end.found, end.tally


def nothing_yet(proposer: Proposer, B: int, most: int) -> tuple[Sampled, Tally]:
    """What `most` steps of B rows sample, and what came of drafts, to be filled in."""
    zeros = jnp.zeros(B, jnp.int32)
    tally = Tally(zeros, zeros, zeros, jnp.zeros((B, proposer.drafts), jnp.int32))
    return none_sampled(B, most * (1 + proposer.drafts)), tally


def rows_of(where: jax.Array, own: Slots, tally: Tally) -> Rows:
    """Rows (DecodeRows.where) as they are once they have made what `tally` says. One whose request came to its end in a
    batch that the host had not seen is idle."""
    room = jnp.minimum(where[:, 1] - own.position, where[:, 2] - tally.made)
    return Rows(where[:, 0], where[:, 3:-1], own.position, jnp.maximum(room, 0), own, where[:, -1])


def proposed(proposer: Proposer, params, drafts: Any, rows: Rows) -> tuple[jax.Array, jax.Array, Any]:
    """(the last token and K drafts [B, 1 + K], how many of these count [B], the proposer's state)."""
    tokens, count, drafts = proposer.propose(params, drafts, rows)
    count = jnp.clip(count, 0, jnp.maximum(rows.room - 1, 0))
    return jnp.concatenate([rows.own.last[:, None], tokens], axis=1), count, drafts


def places(position: jax.Array, room: jax.Array, count: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
    """(positions, which are no padding), both [B, T], of the last token and `count` [B] drafts."""
    index = jnp.arange(T)[None]
    valid = (index <= count[:, None]) & (room > 0)[:, None]
    # Padding stands at the row's last position, so that attention goes no farther than the row does.
    return jnp.where((room > 0)[:, None], position[:, None] + jnp.minimum(index, count[:, None]), 0), valid


def verified(
    proposer: Proposer, params, drafts: Any, rows: Rows, fed, count, hidden, logits, found: Sampled, tally: Tally
) -> tuple[Slots, Any, Sampled, Tally]:
    """The rows' slots, the proposer's state, what was sampled and the tally after a step: logits float32 [B, 1 + K, V]
    and hidden [B, 1 + K, D] are the model's of `fed`."""
    own, found, now = _accepted(logits, rows, fed, count, found, tally.made)
    new, K = now - tally.made - 1, proposer.drafts  # drafts that stay
    new_tokens = jnp.where(jnp.arange(1 + K) == new[:, None], own.last[:, None], jnp.roll(fed, -1, axis=1))
    drafts = proposer.observe(params, drafts, rows, new_tokens, new, hidden)
    right = tally.accepted + (jnp.arange(K) < new[:, None])
    return own, drafts, found, Tally(now, tally.steps + (count > 0), tally.drafted + count, right)


def _read(model: ModelDef, layout: PageLayout, params, pages: Pages, rows: Rows, fed: jax.Array, count: jax.Array):
    """Runs the model over the last token and `count` [B] drafts of fed [B, 1 + K]: (hidden [B, 1 + K, D], or the
    streams that it hands out, logits float32 [B, 1 + K, V] whole on every device, pages)."""
    positions, valid = places(rows.position, rows.room, count, fed.shape[1])
    ctx = Paged.make(rows.table, valid, layout, model.execution, adapter=rows.adapter, slot=rows.slot, rows="drafts")
    ctx = dataclasses.replace(ctx, turns=programs.shifted(positions, rows.own.shift))
    lm = model.model(params)
    hidden, pages, aux = lm(fed, positions, ctx, pages)
    return aux.get(HANDED, hidden), jax.reshard(lm.logits(hidden), WHOLE), pages


def _accepted(logits, rows: Rows, fed, count, found: Sampled, made) -> tuple[Slots, Sampled, jax.Array]:
    """Samples position after position while drafts are right; each counts for the penalties of those after it. Returns
    the slots, `found` with the new tokens from `made` [B] on, and how many there are then."""
    B, T = fed.shape
    none = found.token.shape[1]  # beyond the end: dropped

    def going(carry):
        i, alive, *_ = carry
        return (i < T) & jnp.any(alive)

    def one(carry):
        i, alive, own, found, made = carry
        here = jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False)
        sampled, own = sampled_of(here, own, rows.position + i + 1, alive)
        at = (jnp.arange(B), jnp.where(alive, made, none))
        found = jax.tree.map(lambda all, new: all.at[at].set(new, mode="drop"), found, sampled)
        right = sampled.token == jnp.take(fed, i + 1, axis=1, mode="clip")
        return i + 1, alive & (i < count) & right, own, found, made + alive

    start = (jnp.int32(0), rows.room > 0, rows.own, found, made)
    _, _, own, found, made = jax.lax.while_loop(going, one, start)
    return own, found, made
