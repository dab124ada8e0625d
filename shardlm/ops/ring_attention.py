"""Attention over rows that are split over the `context` axis: keys and values travel round the ring while each device
keeps its queries (https://arxiv.org/abs/2310.01889). Owns the order of tokens and who meets whom; a meeting is
attention_pair.py's. It runs on one device's arrays, inside a shard_map.

Tokens are in zigzag order: a row is cut into 2C chunks and device i holds chunks i and 2C - 1 - i, so that under the
causal mask every device has the same work in every step (https://arxiv.org/abs/2307.08691's blocks, balanced).
"""

import functools

import jax
import jax.numpy as jnp

from shardlm.ops.attention_pair import Pair, Side, backward, forward, merge
from shardlm.rules import Rules


def zigzag(a: jax.Array, rules: Rules) -> jax.Array:
    """[B, T] in natural order -> the same rows in zigzag order. For the small arrays of a batch, once a step."""
    C = rules.mesh.context
    B, T = a.shape
    order = [chunk for i in range(C) for chunk in (i, 2 * C - 1 - i)]
    spec = rules.act.spec("batch", "whole_seq")
    whole = jax.reshard(a, rules.act.spec("batch", None))
    chunks = whole.reshape(B, 2 * C, T // (2 * C))
    moved = jnp.concatenate([chunks[:, chunk] for chunk in order], axis=1)
    return jax.reshard(moved, spec)


def ring_attention(q, k, v, segment_ids, *, scale: float, window: int, implementation: str) -> jax.Array:
    """This device's part of causal attention within segments. q [B, T, N, H], k [B, T, K, H], v [B, T, K, Hv] and
    segment_ids int32 [B, T] in zigzag order; returns [B, T, N, Hv]."""
    return _ring(q, k, v, segment_ids, scale, window, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _ring(q, k, v, segment_ids, scale, window, implementation):
    return _forward(q, k, v, segment_ids, scale, window, implementation)[0]


def _forward(q, k, v, segment_ids, scale, window, implementation):
    C, half = jax.lax.axis_size("context"), q.shape[1] // 2
    me = jax.lax.axis_index("context")
    mine = Side(_index(me, C, half), segment_ids)
    same = Pair(scale, True, window, implementation)
    before = Pair(scale, False, window, implementation)
    result = forward(same, q, k, v, mine, mine)
    moving, place = (k, v, segment_ids), 0
    for step in _steps(C, half, window):
        moving, place = _pass_on(moving, C, step - place), step
        other = (me - step) % C

        # Their chunk before ours: all our queries see its first half. After ours: our second half sees all of it.
        def first_half(result, k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments).halves()[0]
            return merge(result, forward(before, q, k[:, :half], v[:, :half], mine, keys))

        def second_half(result, k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments)
            out, lse = result
            late = (out[:, half:], lse[:, half:])
            new = merge(late, forward(before, q[:, half:], k, v, mine.halves()[1], keys))
            return tuple(jnp.concatenate([a[:, :half], b], axis=1) for a, b in zip(result, new, strict=True))

        branches = [lambda result, *_: result, first_half, second_half]
        which = _meeting(me, other, half, window, segment_ids, moving[2])
        result = jax.lax.switch(which, branches, result, *moving)
    out, lse = result
    out = out.astype(q.dtype)
    return out, (q, k, v, segment_ids, out, lse)


def _backward(scale, window, implementation, kept, d_out):
    q, k, v, segment_ids, out, lse = kept
    C, half = jax.lax.axis_size("context"), q.shape[1] // 2
    me = jax.lax.axis_index("context")
    mine = Side(_index(me, C, half), segment_ids)
    same = Pair(scale, True, window, implementation)
    before = Pair(scale, False, window, implementation)
    d_q, *gathered = backward(same, q, k, v, mine, mine, out, lse, d_out)
    moving, place = (k, v, segment_ids), 0
    for step in _steps(C, half, window):
        moving = _pass_on(moving, C, step - place)
        other = (me - step) % C

        def first_half(k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments).halves()[0]
            a, *b = backward(before, q, k[:, :half], v[:, :half], mine, keys, out, lse, d_out)
            return a, *(_pad_rows(x, 0, half) for x in b)

        def second_half(k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments)
            late = [a[:, half:] for a in (out, lse, d_out)]
            a, *b = backward(before, q[:, half:], k, v, mine.halves()[1], keys, *late)
            return _pad_rows(a, half, 0), *b

        def nothing(k, v, segments):
            return tuple(jnp.zeros(a.shape, jnp.float32) for a in (q, k, v))

        which = _meeting(me, other, half, window, segment_ids, moving[2])
        new_q, *new = jax.lax.switch(which, [nothing, first_half, second_half], *moving)
        # The gradients of these keys and values arrive behind the meeting, which does not wait for them.
        gathered, place = _pass_on(gathered, C, step - place), step
        d_q, gathered = d_q + new_q, [a + b for a, b in zip(gathered, new, strict=True)]
    d_k, d_v = _pass_on(gathered, C, -place)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_ring.defvjp(_forward, _backward)


def _index(device, C: int, half: int) -> jax.Array:
    """Where a device's tokens are in the row: int32 [2 * half]."""
    within = jnp.arange(half, dtype=jnp.int32)
    return jnp.concatenate([device * half + within, (2 * C - 1 - device) * half + within])


def _steps(C: int, half: int, window: int) -> list[int]:
    """How many places keys and values have come at each meeting. Those at which no two devices are near enough for the
    window are left out: keys and values pass them by in one move."""
    return [step for step in range(1, C) if _near_enough(min(step, C - step), half, window)]


def _near_enough(places, half: int, window: int):
    """Whether devices so many places apart hold tokens of which one is in the other's window."""
    return (places - 1) * half + 1 < window if window else True


def _meeting(me, other, half: int, window: int, mine, theirs):
    """0: nothing to see, because of the window or since no document has tokens on both sides; 1: all of ours see their
    first half; 2: our second half sees all of theirs. mine and theirs are segment_ids int32 [B, 2 * half]."""
    (early, late), (their_early, their_late) = (jnp.split(a, 2, axis=1) for a in (mine, theirs))
    earlier = other < me
    shares = _shares(late, their_early) | jnp.where(earlier, _shares(early, their_early), _shares(late, their_late))
    sees = shares & _near_enough(jnp.abs(me - other), half, window)
    return jnp.where(sees, jnp.where(earlier, 1, 2), 0)


def _shares(a, b):
    """False if no id of a row of `a` is in the same row of `b`, as far as their ranges tell."""
    return jnp.any((a.min(axis=1) <= b.max(axis=1)) & (b.min(axis=1) <= a.max(axis=1)))


def _pass_on(arrays, C: int, places: int):
    """To the device so many places on."""
    if places % C == 0:
        return arrays
    return jax.lax.ppermute(arrays, "context", [(i, (i + places) % C) for i in range(C)])


def _pad_rows(a, before: int, after: int):
    """[B, T, ...] with rows of zeros. Not `.at[].add`: jaxlib 0.11.2 crashes on a scatter in a manual region."""
    return jnp.pad(a, [(0, 0), (before, after), *[(0, 0)] * (a.ndim - 2)])
