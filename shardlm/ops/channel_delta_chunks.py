"""The gated delta rule with a decay for each number of a key (Kimi Delta Attention, https://arxiv.org/abs/2510.26692),
of chunks of tokens at once: gated_delta_chunks.py's formulas, in which what is left of a key is no factor on products:

    A(x, y)[t, s] = sum_h x[t, h] y[s, h] exp(G[t, h] - G[s, h]),  G the sums of logarithms of decays up to each token
    L = beta[t] A(k, k), s < t;  U = (I + L)^-1 beta v;  W = (I + L)^-1 beta h k
    out = (h q) S + A(q, k) (U - W S)
    S <- l S + (e k)^T (U - W S)

with h, e and l for each number of a key. exp(-G) may be beyond float32, so that A is not one product: between blocks of
BLOCK tokens it is, with what is left since a block began and what was left until then, both at most 1 (section 3.2
there); within a block it is a sum over all numbers, which XLA makes without writing them. Of the forward pass inverse
and states are kept, the rest is made again; but for what goes from chunk to chunk, and the system of equations, its
gradients are jax's own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlm.ops.gated_delta_chunks import LEAST, STEP, Chunks, carried, delta_of, product
from shardlm.ops.unit_inverse import diagonal, inverse_of_unit

BLOCK = 16  # tokens, as flash-linear-attention has it (github.com/fla-org/flash-linear-attention, ops/kda)


class Sums(NamedTuple):
    """G as whole steps, whose sums are exact, and what is left, by which they are differentiated; [..., C, H]."""

    steps: jax.Array
    rest: jax.Array

    def since(self, other: "Sums") -> jax.Array:
        """G less another."""
        return (self.steps - other.steps) + (self.rest - other.rest)

    def map(self, change) -> "Sums":
        return Sums(change(self.steps), change(self.rest))


class Parts(NamedTuple):
    """What chunks are computed from, [n, B, N, ...]: h q, W and e k [C, H], A(q, k) [C, C], U [C, V] and l float32
    [H]."""

    reads: jax.Array
    seen: jax.Array
    U: jax.Array
    W: jax.Array
    writes: jax.Array
    left: jax.Array


@jax.custom_vjp
def chunked(chunks: Chunks, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As gated_delta_chunks.chunked, with log_decay [n, B, N, C, H]."""
    return _forward(chunks, state)[0]


def _forward(chunks: Chunks, state: jax.Array):
    parts, inverse = _parts(chunks)
    P, into = _from_chunk_to_chunk(parts)
    states, state = carried(parts.left, P, into, state)
    out = product("nbgch,nbghv->nbgcv", parts.reads, states)
    out += product("nbgcs,nbgsv->nbgcv", parts.seen, delta_of(parts.U, parts.W, states))
    return (out.astype(chunks.v.dtype), state), (chunks, inverse, states)


def _backward(kept, gradients):
    chunks, inverse, states = kept
    d_out, d_state = gradients
    names = ("q", "k", "v", "log_decay", "beta")

    def of(*given):
        return _parts(chunks._replace(**dict(zip(names, given, strict=True))), inverse)[0]

    parts, back = jax.vjp(of, *(getattr(chunks, name) for name in names))
    P, _ = _from_chunk_to_chunk(parts)
    by_seen = product("nbgcs,nbgcv->nbgsv", parts.seen, d_out)
    asks = product("nbgch,nbgcv->nbghv", parts.reads, d_out)
    asks -= product("nbgch,nbgcv->nbghv", parts.W, by_seen.astype(d_out.dtype))
    after, d_state = carried(parts.left, P, asks.astype(P.dtype), d_state, back=True)
    delta = delta_of(parts.U, parts.W, states)
    d_delta = (by_seen + product("nbgch,nbghv->nbgcv", parts.writes, after)).astype(delta.dtype)
    given = Parts(
        reads=product("nbgcv,nbghv->nbgch", d_out, states),
        seen=product("nbgcv,nbgsv->nbgcs", d_out, delta),
        U=d_delta,
        W=-product("nbgcv,nbghv->nbgch", d_delta, states),
        writes=product("nbgcv,nbghv->nbgch", delta, after),
        left=jnp.sum(states.astype(jnp.float32) * after, axis=-1),
    )
    given = jax.tree.map(lambda d, a: d.astype(a.dtype), given, parts)
    return Chunks(*back(given), None, None), d_state


chunked.defvjp(_forward, _backward)


def _from_chunk_to_chunk(parts: Parts) -> tuple[jax.Array, jax.Array]:
    """P [n, B, N, H, H] and what is written into an empty state [n, B, N, H, V]."""
    P = -product("nbgch,nbgcj->nbghj", parts.writes, parts.W)
    into = product("nbgch,nbgcv->nbghv", parts.writes, parts.U)
    return P.astype(parts.W.dtype), into.astype(parts.W.dtype)


def _sums(log_decay: jax.Array) -> Sums:
    decay = jnp.maximum(log_decay, LEAST)
    steps = jax.lax.stop_gradient(jnp.round(decay / STEP) * STEP)
    return Sums(jnp.cumsum(steps, axis=-2), jnp.cumsum(decay - steps, axis=-2))


def _parts(chunks: Chunks, inverse: jax.Array | None = None) -> tuple[Parts, jax.Array]:
    """With the inverse, which is made where it is not given."""
    (q, k), v, beta, text = chunks.of_values(), chunks.v, chunks.beta[..., None], chunks.text
    sums = _sums(chunks.log_decay)
    both = decayed(jnp.stack([q, k], axis=-3), k, *sums)
    there = jnp.tri(text.shape[-1], dtype=bool) & (text[..., :, None] == text[..., None, :])[:, :, None]
    before = there & ~jnp.eye(text.shape[-1], dtype=bool)
    lower = jnp.where(before, both[..., 1, :, :] * beta, 0.0)  # L
    inverse = inverse_of_unit(lower) if inverse is None else inverse
    held = (text == chunks.before[..., None])[:, :, None, :, None]
    h = jnp.where(held, jnp.exp(sums.steps + sums.rest), 0.0)
    of_last = (text == text[..., -1:])[:, :, None, :, None]
    e = jnp.where(of_last, jnp.exp(sums.map(lambda a: a[..., -1:, :]).since(sums)), 0.0)
    parts = Parts(
        reads=(h * q).astype(q.dtype),
        seen=jnp.where(there, both[..., 0, :, :], 0.0).astype(v.dtype),
        U=_solved(lower, inverse, (beta * v).astype(v.dtype)),
        W=_solved(lower, inverse, (beta * h * k).astype(k.dtype)),
        writes=(e * k).astype(k.dtype),
        left=h[..., -1, :],
    )
    return parts, inverse


@jax.custom_vjp
def _solved(lower: jax.Array, inverse: jax.Array, a: jax.Array) -> jax.Array:
    """(I + lower)^-1 a, by the inverse [..., C, C], float32, rounded as a [..., C, X] is."""
    return product("nbgcs,nbgsx->nbgcx", inverse.astype(a.dtype), a).astype(a.dtype)


def _solved_forward(lower, inverse, a):
    out = _solved(lower, inverse, a)
    return out, (inverse, out)


def _solved_backward(kept, d_out):
    inverse, out = kept
    back = product("nbgcs,nbgcx->nbgsx", inverse.astype(out.dtype), d_out).astype(out.dtype)
    return -product("nbgcx,nbgsx->nbgcs", back, out), None, back


_solved.defvjp(_solved_forward, _solved_backward)


@jax.custom_vjp
def decayed(x: jax.Array, y: jax.Array, steps: jax.Array, rest: jax.Array) -> jax.Array:
    """A(x, y) of several x [..., R, C, H] and y [..., C, H] with these sums: float32 [..., R, C, C], 0 for s > t.

    What is left within blocks has one use each time that it is asked for, so that XLA does not write it (temporaries of
    32 heads of 128 and 8,192 tokens, compiled for an H100: forward 2.6 | 0.9 GiB, forward and back 4.9 | 2.2).
    """
    sums = Sums(steps, rest)
    near, x_near, y_near = _cut(sums), _cut(x), _cut(y)[..., None, :, :]
    each = (_within(near, x_near[..., one, :, :, None, :], y_near) for one in range(x.shape[-3]))
    inside = jnp.stack([jnp.sum(a, axis=-1) for a in each], axis=-4)  # [..., R, blocks, BLOCK, BLOCK]
    count, size = inside.shape[-3:-1]
    whole = jnp.eye(count)[:, None, :, None] * inside[..., :, :, None, :]
    whole = whole.reshape(*whole.shape[:-2], count * size)
    if count > 1:
        since, until = _between(near, sums)
        given = _rounded(x_near, since[..., None, :, :, :]), _rounded(y[..., None, :, :], until)
        whole += product("...rich,...ish->...rics", *given)
    return whole.reshape(*x.shape[:-1], x.shape[-2])


def _decayed_forward(x, y, steps, rest):
    return decayed(x, y, steps, rest), (x, y, steps, rest)


def _decayed_backward(kept, d_out):
    x, y, steps, rest = kept
    sums = Sums(steps, rest)
    near, x_near, y_near = _cut(sums), _cut(x), _cut(y)[..., None, :, :]
    count, size = x_near.shape[-3:-1]
    d_inside, every = diagonal(d_out, size)[..., None], range(x.shape[-3])  # [..., R, blocks, BLOCK, BLOCK, 1]
    each = (_within(near, d_inside[..., one, :, :, :, :], y_near) for one in every)
    dx = jnp.stack([jnp.sum(a, axis=-2) for a in each], axis=-4).reshape(x.shape)
    each = (_within(near, d_inside[..., one, :, :, :, :], x_near[..., one, :, :, None, :]) for one in every)
    dy = sum(jnp.sum(a, axis=-3) for a in each).reshape(y.shape)
    if count > 1:
        since, until = _between(near, sums)
        since = since[..., None, :, :, :]
        rows = d_out.reshape(*d_out.shape[:-2], count, size, count * size).astype(x.dtype)
        of_rows = product("...rics,...ish->...rich", rows, _rounded(y[..., None, :, :], until))
        dx += (since * of_rows).reshape(x.shape)
        of_columns = product("...rics,...rich->...ish", rows, _rounded(x_near, since))
        dy += jnp.sum(until * of_columns, axis=-3)
    return dx.astype(x.dtype), dy.astype(y.dtype), None, jnp.sum(x * dx, axis=-3) - y * dy


decayed.defvjp(_decayed_forward, _decayed_backward)


def _cut(a):
    """[..., C, H] -> [..., blocks, BLOCK, H]."""

    def cut(a: jax.Array) -> jax.Array:
        *others, C, H = a.shape
        size = min(BLOCK, C)
        return a.reshape(*others, C // size, size, H)

    return jax.tree.map(cut, a)


def _rounded(a: jax.Array, factor: jax.Array) -> jax.Array:
    return (a * factor).astype(a.dtype)


def _within(near: Sums, *factors: jax.Array) -> jax.Array:
    """Factors times what is left at each token of each earlier one of its block, [..., blocks, BLOCK, BLOCK, H], which
    is made anew for other factors."""
    near, (a, b) = jax.lax.optimization_barrier((near, factors))
    between = near.map(lambda a: a[..., :, None, :]).since(near.map(lambda a: a[..., None, :, :]))
    return a * b * jnp.exp(jnp.where(jnp.tri(between.shape[-2], dtype=bool)[..., None], between, -jnp.inf))


def _between(near: Sums, sums: Sums) -> tuple[jax.Array, jax.Array]:
    """(what is left at each token since its block began [..., blocks, BLOCK, H], and until then of all before
    [..., blocks, C, H])."""
    count, size = near.rest.shape[-3:-1]
    start = near.map(lambda a: jnp.pad(a[..., :-1, -1:, :], [(0, 0)] * (a.ndim - 3) + [(1, 0), (0, 0), (0, 0)]))
    before = jnp.arange(count * size) < jnp.arange(count)[:, None] * size
    until = start.since(sums.map(lambda a: a[..., None, :, :]))
    return jnp.exp(near.since(start)), jnp.exp(jnp.where(before[..., None], until, -jnp.inf))
