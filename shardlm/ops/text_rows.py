"""Rows of tokens that see the last tokens of their texts, which slots keep, and leave there those that the next ones
see: of n-grams (layers/ngrams.py), in the ways that linear attention takes tokens in (delta_rows.py)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.ops.delta_rows import Rows
from shardlm.ops.short_conv import last_of

Kept = tuple[jax.Array, jax.Array | None]
"""Of all slots the last tokens [S, before + P, ...], P of which may turn out wrong, and where such rows are verified
int32 [S], how far each text is known: the token that stands there is kept behind the `before` ones before it."""
Use = Callable[[jax.Array, jax.Array], Any]
"""(tokens [B, T, ...], those before them [B, before, ...]) -> arrays [B, ...]."""


def follow(
    rows: Rows,
    use: Use,
    before: int,
    none: int,
    x: jax.Array,
    kept: Kept,
    slot: jax.Array,
    position: jax.Array,
    sure: jax.Array,
    valid: jax.Array,
) -> tuple[Any, Kept]:
    """What `use` makes of rows x [B, T, ...] whose first tokens stand at `position` int32 [B] of their texts, with the
    `before` tokens before them, `none` where a text has none, and what is kept then; slot, sure int32 [B] and valid
    bool [B, T] as delta_rows.remembered has them."""
    if rows == "in_turn":
        return _in_turn(use, before, none, x, kept, slot, position, valid)
    own = jax.tree.map(lambda a: a.at[slot].get(mode="promise_in_bounds"), kept)
    if rows == "drafts":
        out, own = _of_drafts(use, before, x, own, position, sure, valid)
    else:
        out, own = _of_known(use, before, none, x, own, position, valid)
    return out, jax.tree.map(lambda a, new: a.at[slot].set(new, mode="promise_in_bounds"), kept, own)


def _of_known(use: Use, before: int, none: int, x, own: Kept, position, valid) -> tuple[Any, Kept]:
    last, start = own
    begins = (position == 0) & valid[:, 0]
    prior = jnp.where(begins[(..., *[None] * (last.ndim - 1))], jnp.asarray(none, last.dtype), last[:, :before])
    out = use(x, prior.astype(x.dtype))
    new = last_of(x, prior, jnp.zeros(valid.shape, jnp.int32), valid)
    if start is None:
        return out, (new, None)
    end = jnp.where(valid[:, 0], position + jnp.sum(valid, axis=1, dtype=jnp.int32), start)
    return out, (jnp.concatenate([new, last[:, before:]], axis=1), end)


def _of_drafts(use: Use, before: int, x, own: Kept, position, sure, valid) -> tuple[Any, Kept]:
    """The tokens kept are those up to where the last step was known to be right and those that it read from there on,
    of which the ones before `position` stayed."""
    last, start = own
    runs, width = valid[:, 0], last.shape[1]
    behind = jnp.where(runs, position - start, 0)[:, None]  # of the tokens that were not sure, those that stayed
    seen = _at(last, behind + jnp.arange(before))
    out = use(x, seen.astype(x.dtype))
    whole = jnp.concatenate([last, x.astype(last.dtype)], axis=1)
    place = (sure - start)[:, None] + jnp.arange(width)  # among the kept, of each of those that are kept now
    place = jnp.where(place < behind + before, place, width + place - behind - before)
    new = _at(whole, jnp.minimum(place, whole.shape[1] - 1))
    return out, (jnp.where(runs[(..., *[None] * (new.ndim - 1))], new, last), jnp.where(runs, sure, start))


def _in_turn(use: Use, before: int, none: int, x, kept: Kept, slot, position, valid) -> tuple[Any, Kept]:
    """Each row through the same program of one, up to the last that has a token."""

    def one(i, carry):
        out, kept = carry
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, i, 1)  # noqa: E731
        where = part(slot)
        own = jax.tree.map(lambda a: a.at[where].get(mode="promise_in_bounds"), kept)
        new, own = _of_known(use, before, none, part(x), own, part(position), part(valid))
        kept = jax.tree.map(lambda a, b: a.at[where].set(b, mode="promise_in_bounds"), kept, own)
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, i, 0), out, new), kept

    seen = jax.ShapeDtypeStruct((len(x), before, *x.shape[2:]), x.dtype)
    shapes = jax.eval_shape(use, x, seen)
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), kept
    return jax.lax.fori_loop(0, jnp.max(jnp.where(valid[:, 0], jnp.arange(len(valid)) + 1, 0)), one, start)


def _at(a: jax.Array, index: jax.Array) -> jax.Array:
    """a [B, T, ...] at index int32 [B, n]."""
    return jnp.take_along_axis(a, index.reshape(*index.shape, *(1,) * (a.ndim - 2)), axis=1)
