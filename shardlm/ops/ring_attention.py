"""Attention over rows that are split over the `context` axis: keys and values travel round the ring while each device
keeps its queries (https://arxiv.org/abs/2310.01889). Owns the order of tokens and who meets whom; a meeting is
attention_pair.py's. It runs on one device's arrays, inside a shard_map.

Tokens are in zigzag order: a row is cut into 2C chunks and device i holds chunks i and 2C - 1 - i, so that under the
causal mask every device has the same work in every step (https://arxiv.org/abs/2307.08691's blocks, balanced).

Each move hides behind the meeting before it. For that, an iteration of the loop makes one move, which waits for the
meeting before that one: a GPU has one collective under way at a time, and without the wait XLA makes all moves first,
one after the other (8 H100, 131,072 tokens, 32 heads, 8 kv heads: 1.44 GiB of temporaries for any number of devices,
where they were 2.7 for 8 and 8.7 for 32; compiled).
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.ops.attention_pair import Pair, Side, backward, forward, merge
from shardlm.ops.sinks import gradient_of_sinks, with_sinks
from shardlm.rules import Rules


def zigzag(a: jax.Array, rules: Rules) -> jax.Array:
    """[B, T, ...] in natural order -> the same rows in zigzag order. For the arrays of a batch, once a step."""
    C = rules.mesh.context
    B, T, *rest = a.shape
    order = [chunk for i in range(C) for chunk in (i, 2 * C - 1 - i)]
    spec = rules.act.spec("batch", "whole_seq")
    whole = jax.reshard(a, rules.act.spec("batch", None))
    chunks = whole.reshape(B, 2 * C, T // (2 * C), *rest)
    moved = jnp.concatenate([chunks[:, chunk] for chunk in order], axis=1)
    return jax.reshard(moved, spec)


def ring_attention(
    q,
    k,
    v,
    segment_ids,
    *,
    scale: float,
    window: int,
    implementation: str,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """This device's part of causal attention within segments. q [B, T, N, H], k [B, T, K, H], v [B, T, K, Hv] and
    segment_ids int32 [B, T] in zigzag order; returns [B, T, N, Hv]. `softcap`, which cuDNN does not know, and `sinks`
    [N] as in ops/attention.py."""
    return _ring(q, k, v, segment_ids, sinks, Pair(scale, True, window, implementation, softcap))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _ring(q, k, v, segment_ids, sinks, pair: Pair):
    return _forward(q, k, v, segment_ids, sinks, pair)[0]


def _forward(q, k, v, segment_ids, sinks, pair: Pair):
    ring = _Ring.make(_after(q, segment_ids), pair.window)
    mine, half = ring.side(ring.me), ring.half
    before = dataclasses.replace(pair, diagonal=False)

    def meet(other, result, kv):
        keys = ring.side(other)

        # Their chunk before ours: all our queries see its first half. After ours: our second half sees all of it.
        def first_half(result, k, v):
            return merge(result, forward(before, q, k[:, :half], v[:, :half], mine, keys.halves()[0]))

        def second_half(result, k, v):
            early, late = zip(*map(_halves, result), strict=True)
            late = merge(late, forward(before, q[:, half:], k, v, mine.halves()[1], keys))
            return tuple(jnp.concatenate(parts, axis=1) for parts in zip(early, late, strict=True))

        branches = [lambda result, *_: result, first_half, second_half]
        return jax.lax.switch(ring.meeting(other), branches, result, *_unpack(kv, k)), None

    result, _ = ring.tour(_pack(k, v), forward(pair, q, k, v, mine, mine), None, meet)
    out, lse = with_sinks(*result, sinks)
    out = out.astype(q.dtype)
    return out, (q, k, v, segment_ids, sinks, out, lse)


def _backward(pair: Pair, kept, d_out):
    q, k, v, segment_ids, sinks, out, lse = kept
    ring = _Ring.make(_after(q, segment_ids), pair.window)
    mine, half = ring.side(ring.me), ring.half
    before = dataclasses.replace(pair, diagonal=False)

    def meet(other, d_q, kv):
        keys = ring.side(other)

        def first_half(k, v):
            theirs = (k[:, :half], v[:, :half], mine, keys.halves()[0])
            a, *b = backward(before, q, *theirs, out, lse, d_out)
            return a, _pad_rows(_pack(*b), 0, half)

        def second_half(k, v):
            late = [a[:, half:] for a in (out, lse, d_out)]
            a, *b = backward(before, q[:, half:], k, v, mine.halves()[1], keys, *late)
            return _pad_rows(a, half, 0), _pack(*b)

        def nothing(k, v):
            return jnp.zeros(q.shape, jnp.float32), jnp.zeros(kv.shape, jnp.float32)

        branches = [nothing, first_half, second_half]
        new_q, new_kv = jax.lax.switch(ring.meeting(other), branches, *_unpack(kv, k))
        return d_q + new_q, new_kv

    d_q, *d_kv = backward(pair, q, k, v, mine, mine, out, lse, d_out)
    d_q, d_kv = ring.tour(_pack(k, v), d_q, _pack(*d_kv), meet)
    d_k, d_v = (a.astype(k.dtype) for a in _unpack(d_kv, k))
    return d_q.astype(q.dtype), d_k, d_v, None, gradient_of_sinks(sinks, out, lse, d_out)


_ring.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The devices of the context axis: C of them, of which this is `me`; half of a device's tokens is one chunk.
    all_segment_ids int32 [C, B, 2 * half]."""

    C: int
    me: jax.Array
    half: int
    window: int
    all_segment_ids: jax.Array

    @classmethod
    def make(cls, segment_ids: jax.Array, window: int) -> "_Ring":
        whole = jax.lax.all_gather(segment_ids, "context")
        return cls(len(whole), jax.lax.axis_index("context"), segment_ids.shape[1] // 2, window, whole)

    def side(self, device: jax.Array) -> Side:
        """Where a device's tokens are."""
        within = jnp.arange(self.half, dtype=jnp.int32)
        late = 2 * self.C - 1 - device
        index = jnp.concatenate([device * self.half + within, late * self.half + within])
        return Side(index, self.all_segment_ids[device])

    def meeting(self, other: jax.Array) -> jax.Array:
        """0: nothing to see, because of the window or since no document has tokens on both sides; 1: all of ours see
        their first half; 2: our second half sees all of theirs."""
        (early, late), (their_early, their_late) = (_halves(self.all_segment_ids[d]) for d in (self.me, other))
        earlier = other < self.me
        chunks = jnp.where(earlier, _share(early, their_early), _share(late, their_late))
        sees = (_share(late, their_early) | chunks) & near(jnp.abs(self.me - other), self.half, self.window)
        return jnp.where(sees, jnp.where(earlier, 1, 2), 0)

    def tour(self, kv: jax.Array, carry: Any, gathered: Any, meet: Callable) -> tuple[Any, Any]:
        """Carries kv from device to device: carry, new = meet(other, carry, kv of that other device) at each stop.
        `gathered`, an array or None, travels one stop behind kv, has each `new` added, and comes home. Returns (carry,
        gathered)."""
        places = stops(self.C, self.half, self.window)
        moves = [b - a for a, b in itertools.pairwise([0, *places])]
        if not places:
            return carry, gathered

        def stop(behind: int, ahead: int, place, state):
            carry, kv, gathered = state
            next_kv, gathered = self._move(_after(carry, kv), ahead, gathered, behind)
            carry, new = meet((self.me - place) % self.C, carry, kv)
            return carry, next_kv, jax.tree.map(jnp.add, gathered, new)

        state = carry, self._pass_on(kv, moves[0]), gathered
        legs = itertools.groupby(zip(places, moves, [*moves[1:], 0], strict=True), key=lambda leg: leg[1:])
        for (behind, ahead), leg in legs:
            there = [place for place, *_ in leg]
            state = jax.lax.fori_loop(there[0], there[-1] + 1, functools.partial(stop, behind, ahead), state)
        carry, _, gathered = state
        return carry, jax.tree.map(lambda a: self._pass_on(a, -places[-1]), gathered)

    def _move(self, kv: jax.Array, ahead: int, gathered: Any, behind: int) -> tuple[jax.Array, Any]:
        """kv moved `ahead` places and `gathered` moved `behind`; together where that is the same way."""
        if gathered is None or ahead != behind:
            return self._pass_on(kv, ahead), jax.tree.map(lambda a: self._pass_on(a, behind), gathered)
        words = [a.view(jnp.uint16) for a in (kv, gathered)]
        both = self._pass_on(jnp.concatenate(words, axis=-1), ahead)
        split = words[0].shape[-1]
        return both[..., :split].view(kv.dtype), both[..., split:].view(gathered.dtype)

    def _pass_on(self, a: jax.Array, places: int) -> jax.Array:
        """To the device so many places on."""
        if places % self.C == 0:
            return a
        return jax.lax.ppermute(a, "context", [(i, (i + places) % self.C) for i in range(self.C)])


def stops(C: int, half: int, window: int) -> list[int]:
    """How many places keys and values have come at each meeting. Where no two devices are near enough for the window,
    they pass by in one move."""
    return [place for place in range(1, C) if near(min(place, C - place), half, window)]


def near(places, half: int, window: int):
    """Whether devices so many places apart, wherever they are, hold tokens of which one is in the other's window."""
    return (places - 1) * half + 1 < window if window else True


def _share(a, b):
    """False if no id of a row of `a` is in the same row of `b`, as far as their ranges tell."""
    return jnp.any((a.min(axis=1) <= b.max(axis=1)) & (b.min(axis=1) <= a.max(axis=1)))


def _after(carry: Any, a: jax.Array) -> jax.Array:
    """`a`, once the floating-point arrays of `carry` are there. By real data, since XLA drops barriers before it
    schedules: where they are NaN, which spoils the step anyway, it is zero. Segment ids that come after a layer's
    queries also keep XLA from making the layer's masks once, to hold them through all layers."""
    there = ~jnp.isnan(jax.tree.leaves(carry)[0].ravel()[0])
    return jnp.where(there, a, jnp.zeros_like(a))


def _halves(a):
    return jnp.split(a, 2, axis=1)


def _pack(k, v):
    """One array, for one move."""
    return jnp.concatenate([k, v], axis=-1)


def _unpack(kv, k):
    return kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]


def _pad_rows(a, before: int, after: int):
    """[B, T, ...] with rows of zeros. Not `.at[].add`: jaxlib 0.11.2 crashes on a scatter in a manual region."""
    return jnp.pad(a, [(0, 0), (before, after), *[(0, 0)] * (a.ndim - 2)])
