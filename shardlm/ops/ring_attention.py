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
    moving = (k, v, segment_ids)
    for step in range(1, C):
        moving = _pass_on(moving, C)
        other = (me - step) % C

        # Their chunk before ours: all our queries see its first half. After ours: our second half sees all of it.
        def first_half(result, k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments).part(0, half)
            return merge(result, forward(before, q, k[:, :half], v[:, :half], mine, keys))

        def second_half(result, k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments)
            out, lse = result
            late = (out[:, half:], lse[:, half:])
            new = merge(late, forward(before, q[:, half:], k, v, mine.part(half, 2 * half), keys))
            return tuple(jnp.concatenate([a[:, :half], b], axis=1) for a, b in zip(result, new, strict=True))

        branches = [lambda result, *_: result, first_half, second_half]
        result = jax.lax.switch(_meeting(me, other, half, window), branches, result, *moving)
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
    d_q, d_k, d_v = backward(same, q, k, v, mine, mine, out, lse, d_out)
    moving = (k, v, segment_ids, d_k, d_v)
    for step in range(1, C):
        moving = _pass_on(moving, C)
        other = (me - step) % C
        k, v, segments, d_k, d_v = moving

        def first_half(d_q, d_k, d_v, k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments).part(0, half)
            a, b, c = backward(before, q, k[:, :half], v[:, :half], mine, keys, out, lse, d_out)
            return d_q + a, _add_rows(d_k, b, 0), _add_rows(d_v, c, 0)

        def second_half(d_q, d_k, d_v, k, v, segments, other=other):
            keys = Side(_index(other, C, half), segments)
            late = [a[:, half:] for a in (out, lse, d_out)]
            a, b, c = backward(before, q[:, half:], k, v, mine.part(half, 2 * half), keys, *late)
            return _add_rows(d_q, a, half), d_k + b, d_v + c

        branches = [lambda d_q, d_k, d_v, *_: (d_q, d_k, d_v), first_half, second_half]
        which = _meeting(me, other, half, window)
        d_q, d_k, d_v = jax.lax.switch(which, branches, d_q, d_k, d_v, k, v, segments)
        moving = (k, v, segments, d_k, d_v)
    d_k, d_v = _pass_on(moving[3:], C)
    return d_q.astype(q.dtype), d_k.astype(kept[1].dtype), d_v.astype(kept[2].dtype), None


_ring.defvjp(_forward, _backward)


def _index(device, C: int, half: int) -> jax.Array:
    """Where a device's tokens are in the row: int32 [2 * half]."""
    within = jnp.arange(half, dtype=jnp.int32)
    return jnp.concatenate([device * half + within, (2 * C - 1 - device) * half + within])


def _meeting(me, other, half: int, window: int):
    """0: nothing to see, which only a window brings about; 1: their first half; 2: our second half sees all."""
    which = jnp.where(other < me, 1, 2)
    if not window:
        return which
    nearest = (jnp.abs(me - other) - 1) * half + 1
    return jnp.where(nearest >= window, 0, which)


def _pass_on(arrays, C: int):
    return jax.lax.ppermute(arrays, "context", [(i, (i + 1) % C) for i in range(C)])


def _add_rows(total, part, start: int):
    """total with `part` added to its rows from `start` on."""
    after = total.shape[1] - start - part.shape[1]
    return total + jnp.pad(part, [(0, 0), (start, after), *[(0, 0)] * (total.ndim - 2)])
