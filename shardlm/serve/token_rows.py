"""The program of the deterministic mode: rows of one token each, those of prompts and those that decode alike. One
executable of one shape computes every token, so that its bits do not depend on what else is there, on how a prompt was
cut, or on whether a token was generated or read again (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/
keeps kernels and makes each invariant; here nothing is asked of them but that a row's place does not matter)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.layers.page_layout import PageLayout
from shardlm.models.transformer import Transformer
from shardlm.ops.batch_sampling import Edits, RowSettings, Sampled
from shardlm.serve.programs import (
    WHOLE,
    Scores,
    hidden_of_one,
    keep_slots,
    none_sampled,
    sampled_of,
    scores_of,
    seen_at,
)
from shardlm.serve.sampling_params import MAX_LOGPROBS
from shardlm.serve.state import ServeState, Slots, put, take
from shardlm.state import ModelDef


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRows:
    """Rows of a token each. Of a prompt, a row before another of the same request has the smaller position. Padding has
    the last slot, no samples and no token.

    where   int32 [M, 6 + W + 1]: slot, position, samples, the token or -1 for the slot's last one, the token whose
            score is wanted, whether it is (0 or 1), the row's pages in each group, and its adapter
    seen    int32 [M, 1], which of the state's vectors the token stands for, -1: none; None: the model does not see
    turns   int32 [M, 1, 3], where it is on three axes; None: it has one
    """

    where: jax.Array
    seen: jax.Array | None = None
    turns: jax.Array | None = None


def run(model: ModelDef, layout: PageLayout, most: int, params, state: ServeState, rows: TokenRows, steps: jax.Array):
    """`steps` (int32, at most `most`) tokens for every row that samples, each fed to the next step; a row with fewer
    samples idles. Returns (state, Sampled of [M, most, ...], Scores of [M], float32 [M, D] of the first step after the
    last norm)."""
    where = rows.where
    own, said = take(state.slots, where[:, 0]), Said.none(where.shape[0], most, model.config.embed_dim)

    def step(i, carry):
        pages, own, said = carry
        read, position, active = fed(where, own.last, i)
        given = (pages, where[:, 6:-1], read, position, active, where[:, -1], where[:, 0])
        places, turns = of_images(rows, position, own.shift, i)
        images = {"seen": seen_at(state.vectors, places), "turns": turns}
        lm, hidden, pages = hidden_of_one(model, layout, params, *given, rows="in_turn", **images)
        own, said = sampled(lm, hidden, where, own, said, i)
        return pages, own, said

    pages, own, said = jax.lax.fori_loop(0, steps, step, (state.pages, own, said))
    state = dataclasses.replace(state, pages=pages, slots=kept(state.slots, where, own))
    return state, said.found, said.scores, said.first


def of_images(
    rows: Any, position: jax.Array, shift: jax.Array | None, i: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    """`seen` and `turns` of TokenRows at step i: the first reads what is given, the others what follows."""
    if rows.seen is None:
        return None, None
    given = (i == 0) & (rows.where[:, 3:4] >= 0)
    seen = jnp.where(given, rows.seen, -1)
    if shift is None:
        return seen, None
    later = jnp.broadcast_to((position + shift)[:, None, None], rows.turns.shape)
    return seen, jnp.where(given[..., None], rows.turns, later)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Said:
    """What comes of rows: Sampled of [M, most, ...], Scores of [M] and float32 [M, D], both of the first step."""

    found: Sampled
    scores: Scores
    first: jax.Array

    @classmethod
    def none(cls, M: int, most: int, width: int) -> "Said":
        """To be filled in."""
        n = (M, MAX_LOGPROBS)
        zeros, integers = (lambda *s: jnp.zeros(s, jnp.float32)), (lambda *s: jnp.zeros(s, jnp.int32))
        return cls(none_sampled(M, most), Scores(zeros(M), integers(M), integers(*n), zeros(*n)), zeros(M, width))


def fed(where: jax.Array, last: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the token that each row reads at step i, its position, whether it does), from its slot's last token."""
    start, samples, token = where[:, 1], where[:, 2], where[:, 3]
    given = (i == 0) & (token >= 0)
    return jnp.where(given, token, last), start + i, given | (i < samples)


def sampled(lm: Transformer, hidden, where: jax.Array, own: Slots, said: Said, i: jax.Array) -> tuple[Slots, Said]:
    """After the model's hidden [M, 1, D] of step i: the rows' slots, and what they have said."""
    start, samples, target, scored = where[:, 1], where[:, 2], where[:, 4], where[:, 5]
    logits = jax.reshard(lm.logits(hidden)[:, 0], WHOLE)
    new, own = sampled_of(logits, own, start + i + 1, i < samples)
    found = jax.tree.map(lambda all, one: all.at[:, i].set(one), said.found, new)
    wanted = (i == 0) & jnp.any(scored > 0)
    scores = jax.lax.cond(wanted, lambda: scores_of(logits, target), lambda: said.scores)
    whole = jax.reshard(hidden[:, 0], WHOLE).astype(jnp.float32)
    return own, Said(found, scores, jnp.where(i == 0, whole, said.first))


def kept(slots: Slots, where: jax.Array, own: Slots) -> Slots:
    """All slots after the last step; several rows may read a slot, and one at most samples."""
    slot, samples, padding = where[:, 0], where[:, 2], slots.last.shape[0] - 1
    return keep_slots(slots, jnp.where(samples > 0, slot, padding), own)


def begin(
    state: ServeState,
    slot: jax.Array,
    settings: RowSettings,
    edits: Edits,
    told: jax.Array,
    shift: jax.Array | None = None,
) -> ServeState:
    """The requests that slots int32 [R] serve from now on; shift int32 [R] as ChunkRows has it."""
    slots = state.slots
    new = dataclasses.replace(
        slots,
        settings=put(slots.settings, slot, settings),
        edits=put(slots.edits, slot, edits),
        told=slots.told.at[slot].set(told),
        shift=None if slots.shift is None else slots.shift.at[slot].set(shift),
    )
    return dataclasses.replace(state, slots=new)
