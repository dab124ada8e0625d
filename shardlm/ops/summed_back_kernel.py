"""Gradients of Mamba 2's rule over rows (summed_kernel.py): Pallas kernels for what values are asked for, and for what
queries and keys are, whose heads are summed where they are made."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.summed_kernel import Rates, Tile, carried, rows_of
from shardlm.ops.summed_sizes import ROWS, parts_of


class Gradients(NamedTuple):
    """Of q, k, v and of the state, as these are, and float32 [B, N, T]: of beta, and of the sums of logarithms of
    decays up to each token of its chunk, of which `last` [B, N, n] is the last one's, beside."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    state: jax.Array
    beta: jax.Array
    sums: jax.Array
    last: jax.Array


def gradients(q, k, v, rates: Rates, state, d_out, d_state, interpret: bool = False) -> Gradients:
    """Of what summed_kernel.outputs is given, for d_out [B, T, N, V] of its outputs and d_state of the last state.
    States are made again."""
    weights, run = rates.e * rates.beta, {"interpret": interpret}
    states, _ = carried(k, v, weights, rates.left, state, **run)
    after, d_first, d_left = carried(q, d_out, rates.h, rates.left, d_state, states, back=True, **run)
    d_v, by_tokens, by_weights = _of_values(q, k, v, rates, weights, after, d_out, **run)
    d_q, rows = _of_queries(q, k, v, rates, states, d_out, **run)
    d_k = _of_keys(q, k, v, rates, weights, after, d_out, **run)
    behind = weights * by_weights
    d_sums = rows - rates.beta * by_tokens - behind
    B, N, n = rates.left.shape
    last = jnp.sum(behind.reshape(B, N, n, rates.chunk), axis=-1) + rates.left * d_left
    return Gradients(d_q, d_k, d_v, d_first, by_tokens + rates.e * by_weights, d_sums, last)


def _how(grid: tuple[int, ...], name: str, interpret: bool, num_warps: int) -> dict:
    options = triton.CompilerParams(num_warps=num_warps, num_stages=2)
    return {"grid": grid, "compiler_params": options, "interpret": interpret, "name": name}


def _of_values(q, k, v, rates, weights, after, d_out, interpret: bool):
    """(d_v, and float32 [B, N, T]: what each token brings to those after it, and to the state behind its chunk, by the
    gradients of these, without beta and e beta)."""
    (B, T, N, _), group = v.shape, v.shape[2] // k.shape[2]
    made = jax.ShapeDtypeStruct(v.shape, v.dtype), *[jax.ShapeDtypeStruct((B, N, T), jnp.float32)] * 2
    kernel = functools.partial(_values, rates.chunk, group)
    call = pl.pallas_call(kernel, made, **_how((N, T // ROWS, B), "summed_values_back", interpret, 4))
    return call(*_sums(rates), rates.beta, weights, q, k, v, after, d_out)


def _values(chunk, group, steps, rest, text, beta, weights, q, k, v, after, d_out, d_v, by_tokens, by_weights):
    head, piece, b = (pl.program_id(axis) for axis in range(3))
    tile, here, of = Tile(chunk, b, (steps, rest, text)), rows_of(piece), head // group
    keys, values = k[b, here, of, :], v[b, here, head, :]
    asked = triton.dot(keys, after[b, tile.chunk_of(piece), head, :, :])
    by_weights[b, head, here] = jnp.sum(asked * values.astype(jnp.float32), axis=1)

    def queries(other, carry):
        made, brought = carry
        given = d_out[b, rows_of(other), head, :]
        seen = triton.dot(keys, q[b, rows_of(other), of, :], trans_b=True) * tile.decays(head, other, piece, True)
        brought += jnp.sum(triton.dot(values, given, trans_b=True) * seen, axis=1)
        seen = (seen * beta[b, head, here][:, None]).astype(values.dtype)
        return made + triton.dot(seen, given), brought

    begin = weights[b, head, here][:, None] * asked, jnp.zeros(ROWS, jnp.float32)
    made, brought = jax.lax.fori_loop(piece, tile.first(piece) + tile.pieces, queries, begin)
    d_v[b, here, head, :] = made.astype(d_v.dtype)
    by_tokens[b, head, here] = brought


def _of_queries(q, k, v, rates, states, d_out, interpret: bool):
    """(d_q, what decays bring to each token's output, by its gradient: float32 [B, N, T])."""
    (B, T, K, H), N, pieces = q.shape, v.shape[2], rates.chunk // ROWS
    parts, each = _parts(N // K)
    made = [_summed_later(q, parts)]
    made += [jax.ShapeDtypeStruct((B, N, many, T), jnp.float32) for many in (pieces, 1)]
    kernel = functools.partial(_queries, rates.chunk, each)
    call = pl.pallas_call(
        kernel, made, **_how((T // ROWS, K * parts, B), "summed_queries_back", interpret, _warps(H, v.shape[3]))
    )
    d_q, seen, held = call(*_sums(rates), rates.beta, rates.h, q, k, v, states, d_out)
    # Pieces of a chunk that come later than a token's are not written.
    own = (jnp.arange(T) // ROWS) % pieces
    seen = jnp.where(jnp.arange(pieces)[:, None] <= own, seen, 0.0)
    return _sum_parts(d_q, q), jnp.sum(seen, axis=2) + held[:, :, 0]


def _queries(chunk, each, steps, rest, text, beta, h, q, k, v, states, d_out, d_q, by_seen, by_held):
    piece, part, b = (pl.program_id(axis) for axis in range(3))
    of, tile, here = part // d_q.shape[0], Tile(chunk, b, (steps, rest, text)), rows_of(piece)
    queries, at = q[b, here, of, :], tile.chunk_of(piece)

    def keys(other, made):
        there = rows_of(other)
        keys = k[b, there, of, :]
        products = triton.dot(queries, keys, trans_b=True)

        def one(turn, summed):
            head = part * each + turn
            asked = triton.dot(d_out[b, here, head, :], v[b, there, head, :], trans_b=True)
            asked *= tile.decays(head, piece, other) * beta[b, head, there][None]
            by_seen[b, head, other % tile.pieces, here] = jnp.sum(asked * products, axis=1)
            return summed + asked

        summed = jax.lax.fori_loop(0, each, one, jnp.zeros((ROWS, ROWS), jnp.float32))
        return made + triton.dot(summed.astype(keys.dtype), keys)

    def held(turn, made):
        head = part * each + turn
        asked = triton.dot(d_out[b, here, head, :], states[b, at, head, :, :], trans_b=True)
        asked *= h[b, head, here][:, None]
        by_held[b, head, 0, here] = jnp.sum(asked * queries.astype(jnp.float32), axis=1)
        return made + asked

    made = jax.lax.fori_loop(0, each, held, jnp.zeros(queries.shape, jnp.float32))
    made = jax.lax.fori_loop(tile.first(piece), piece + 1, keys, made)
    d_q[part % d_q.shape[0], b, here, of, :] = made.astype(d_q.dtype)


def _of_keys(q, k, v, rates, weights, after, d_out, interpret: bool) -> jax.Array:
    (B, T, K, H), N = k.shape, v.shape[2]
    parts, each = _parts(N // K)
    kernel = functools.partial(_keys, rates.chunk, each)
    how = _how((T // ROWS, K * parts, B), "summed_keys_back", interpret, _warps(H, v.shape[3]))
    call = pl.pallas_call(kernel, _summed_later(k, parts), **how)
    return _sum_parts(call(*_sums(rates), rates.beta, weights, q, v, after, d_out), k)


def _keys(chunk, each, steps, rest, text, beta, weights, q, v, after, d_out, d_k):
    piece, part, b = (pl.program_id(axis) for axis in range(3))
    of, tile, here = part // d_k.shape[0], Tile(chunk, b, (steps, rest, text)), rows_of(piece)
    at = tile.chunk_of(piece)

    def queries(other, made):
        there = rows_of(other)

        def one(turn, summed):
            head = part * each + turn
            asked = triton.dot(v[b, here, head, :], d_out[b, there, head, :], trans_b=True)
            return summed + asked * tile.decays(head, other, piece, True) * beta[b, head, here][:, None]

        summed = jax.lax.fori_loop(0, each, one, jnp.zeros((ROWS, ROWS), jnp.float32))
        return made + triton.dot(summed.astype(q.dtype), q[b, there, of, :])

    def behind(turn, made):
        head = part * each + turn
        brought = (weights[b, head, here][:, None] * v[b, here, head, :]).astype(v.dtype)
        return made + triton.dot(brought, after[b, at, head, :, :], trans_b=True)

    made = jax.lax.fori_loop(0, each, behind, jnp.zeros((ROWS, q.shape[-1]), jnp.float32))
    made = jax.lax.fori_loop(piece, tile.first(piece) + tile.pieces, queries, made)
    d_k[part % d_k.shape[0], b, here, of, :] = made.astype(d_k.dtype)


def _sums(rates: Rates) -> tuple[jax.Array, jax.Array, jax.Array]:
    return rates.steps, rates.rest, rates.text


def _parts(group: int) -> tuple[int, int]:
    """(programs that share the heads of a group, heads of each)."""
    parts = parts_of(group)
    return parts, group // parts


def _warps(H: int, V: int) -> int:
    """So many that a tile of ROWS x H in float32 leaves registers for others."""
    return 8 if H > 128 or V > 64 else 4


def _summed_later(like: jax.Array, parts: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((parts, *like.shape), like.dtype if parts == 1 else jnp.float32)


def _sum_parts(made: jax.Array, like: jax.Array) -> jax.Array:
    return made[0] if len(made) == 1 else jnp.sum(made, axis=0).astype(like.dtype)
