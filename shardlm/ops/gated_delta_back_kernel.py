"""Gradients of the gated delta rule over rows (gated_delta_kernel.py): Pallas kernels, by way of Triton. With the names
of gated_delta_chunks.py, T = (I + L)^-1, S the state before a chunk and A the gradient of that behind it, what tokens
change is the solution of (I + L) delta = beta (v - h k S), and with R = T^T d_delta

    d_delta = ((q . k) D)^T d_out + e k A
    the gradient of S = l A + (h q)^T d_out - (beta h k)^T R
    d_v = beta R,  dL = -R delta^T below the diagonal,  and what h k is asked for = -beta R S^T

so that neither U nor W is needed. One kernel makes what outputs ask of changes, one carries A from chunk to chunk and
leaves R there, as flash-linear-attention has them (github.com/fla-org/flash-linear-attention, ops/common/
chunk_delta_h.py). One goes over pairs of tokens of a chunk and one over states, of all heads that share keys, whose
gradients are summed where they are made: both in one would not fit into registers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.gated_delta_kernel import Kept, stages_of
from shardlm.ops.summed_back_kernel import Gradients
from shardlm.ops.summed_kernel import COLUMNS, Rates, Tile, rows_of
from shardlm.ops.summed_sizes import ROWS

KEYS = 32  # numbers of keys that a program goes over together


class Back(NamedTuple):
    """What goes back from chunk to chunk: the gradient of the state behind each chunk [B, n, N, H, V], R [B, T, N, V],
    and the gradient of the first state, float32."""

    after: jax.Array
    asked: jax.Array
    first: jax.Array


class Pairs(NamedTuple):
    """What pairs of tokens of a chunk bring: the gradients of v, of q . k and of k . k for each head of keys
    [B, T, K, ROWS], and float32 [B, N, T] those of beta and of the sums of logarithms of decays up to each token."""

    v: jax.Array
    queries: jax.Array
    keys: jax.Array
    beta: jax.Array
    sums: jax.Array


def gradients(kept: Kept, q, k, v, rates: Rates, state, d_out, d_state, interpret: bool = False) -> Gradients:
    """Of what gated_delta_kernel.outputs is given, for d_out [B, T, N, V] of its outputs and d_state of the last
    state."""
    del state  # the first of those that are kept
    run = {"interpret": interpret}
    back = _carried(q, k, rates, kept, _of_changes(q, k, rates, d_out, **run), d_out, d_state, **run)
    pairs = _of_pairs(q, k, v, rates, kept, back.asked, d_out, **run)
    d_q, d_k, *by_parts = _of_states(q, k, rates, kept, back, pairs, d_out, **run)
    d_beta, sums, last = (jnp.sum(a, axis=0) for a in by_parts)
    return Gradients(d_q, d_k, pairs.v, back.first, pairs.beta + d_beta, pairs.sums + sums, last)


def _how(name: str, grid: tuple[int, ...], num_warps: int, num_stages: int, interpret: bool) -> dict:
    options = triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)
    return {"grid": grid, "compiler_params": options, "interpret": interpret, "name": name}


def _of_changes(q, k, rates: Rates, d_out, interpret: bool) -> jax.Array:
    """((q . k) D)^T d_out, in the type and shape of values."""
    (B, T, N, _), K = d_out.shape, k.shape[2]
    how = _how("delta_changes_back", (N, T // ROWS, B), 4, 1, interpret)
    call = pl.pallas_call(functools.partial(_changes, N // K), jax.ShapeDtypeStruct(d_out.shape, d_out.dtype), **how)
    return call(rates.steps, rates.rest, rates.text, q, k, d_out)


def _changes(group, steps, rest, text, q, k, d_out, asked):
    head, chunk, b = (pl.program_id(axis) for axis in range(3))
    tile, here, of = Tile(ROWS, b, (steps, rest, text)), rows_of(chunk), head // group
    seen = triton.dot(k[b, here, of, :], q[b, here, of, :], trans_b=True) * tile.decays(head, chunk, chunk, True)
    asked[b, here, head, :] = triton.dot(seen.astype(d_out.dtype), d_out[b, here, head, :]).astype(asked.dtype)


def _carried(q, k, rates: Rates, kept: Kept, asked, d_out, d_state, interpret: bool) -> Back:
    """`asked`, of changes by outputs, becomes R."""
    (B, _, N, V), (K, H), n = d_out.shape, k.shape[2:], rates.left.shape[-1]
    made = jax.ShapeDtypeStruct((B, n, N, H, V), d_out.dtype), jax.ShapeDtypeStruct(asked.shape, asked.dtype)
    made = *made, jax.ShapeDtypeStruct(d_state.shape, jnp.float32)
    grid = B, N, V // COLUMNS
    how = _how("delta_states_back", grid, 4, stages_of(grid), interpret) | {"input_output_aliases": {7: 1}}
    call = pl.pallas_call(functools.partial(_states, n, N // K), made, **how)
    given = rates.h, rates.e, rates.beta * rates.h, rates.left, q, k, kept.inverse, asked, d_out, d_state
    return Back(*call(*given))


def _states(n, group, h, e, weights, left, q, k, inverse, asked, d_out, d_state, after, back, first):
    b, head, part = (pl.program_id(axis) for axis in range(3))
    columns, of = pl.ds(part * COLUMNS, COLUMNS), head // group

    def step(turn, held):
        chunk = n - 1 - turn
        here, given = rows_of(chunk), held.astype(after.dtype)
        after[b, chunk, head, :, columns] = given
        keys, queries = k[b, here, of, :], q[b, here, of, :]
        change = asked[b, here, head, columns].astype(jnp.float32)
        change += e[b, head, here][:, None] * triton.dot(keys, given)
        solved = triton.dot(inverse[b, here, head, :], change.astype(back.dtype), trans_a=True)
        back[b, here, head, columns] = solved.astype(back.dtype)
        by_queries = (h[b, head, here][:, None] * d_out[b, here, head, columns]).astype(back.dtype)
        by_keys = (weights[b, head, here][:, None] * solved).astype(back.dtype)
        made = triton.dot(queries, by_queries, trans_a=True) - triton.dot(keys, by_keys, trans_a=True)
        return left[b, head, chunk] * held + made

    first[b, head, :, columns] = jax.lax.fori_loop(0, n, step, d_state[b, head, :, columns])


def _of_pairs(q, k, v, rates: Rates, kept: Kept, asked, d_out, interpret: bool) -> Pairs:
    (B, T, K, _), N = q.shape, v.shape[2]
    of_keys, each = jax.ShapeDtypeStruct((B, T, K, ROWS), k.dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    made = jax.ShapeDtypeStruct(v.shape, v.dtype), of_keys, of_keys, each, each, each
    how = _how("delta_pairs_back", (K, T // ROWS, B), 8, 1, interpret)
    call = pl.pallas_call(functools.partial(_pairs, N // K), made, **how)
    *made, seen, same = call(rates.steps, rates.rest, rates.text, rates.beta, q, k, v, kept.changes, asked, d_out)
    return Pairs(*made, seen + same)


def _pairs(group, steps, rest, text, beta, q, k, v, changes, asked, d_out, d_v, by_queries, by_keys, d_beta, *sums):
    of, chunk, b = (pl.program_id(axis) for axis in range(3))
    tile, here, place = Tile(ROWS, b, (steps, rest, text)), rows_of(chunk), jnp.arange(ROWS)
    keys, none = k[b, here, of, :], jnp.zeros((ROWS, ROWS), jnp.float32)
    of_seen, of_same = sums

    def asked_of(a, head) -> jax.Array:
        return triton.dot(a, changes[b, here, head, :], trans_b=True) * tile.decays(head, chunk, chunk)

    def bring(inner) -> jax.Array:
        return jnp.sum(inner, axis=1) - jnp.sum(inner, axis=0)

    seen = triton.dot(q[b, here, of, :], keys, trans_b=True)

    def outputs(turn, summed):
        head = of * group + turn
        found = asked_of(d_out[b, here, head, :], head)
        of_seen[b, head, here] = bring(found * seen)
        return summed + found

    by_queries[b, here, of, :] = jax.lax.fori_loop(0, group, outputs, none).astype(by_queries.dtype)
    same = jnp.where(place[:, None] > place[None], triton.dot(keys, keys, trans_b=True), 0.0)

    def taken(turn, summed):
        head = of * group + turn
        solved, share = asked[b, here, head, :], beta[b, head, here]
        found = -asked_of(solved, head)
        solved = solved.astype(jnp.float32)
        d_v[b, here, head, :] = (share[:, None] * solved).astype(d_v.dtype)
        by_values = jnp.sum(solved * v[b, here, head, :].astype(jnp.float32), axis=1)
        d_beta[b, head, here] = by_values + jnp.sum(found * same, axis=1)
        found *= share[:, None]
        of_same[b, head, here] = bring(found * same)
        return summed + found

    found = jax.lax.fori_loop(0, group, taken, none)
    by_keys[b, here, of, :] = jnp.where(place[:, None] > place[None], found, 0.0).astype(by_keys.dtype)


def _of_states(
    q, k, rates: Rates, kept: Kept, back: Back, pairs: Pairs, d_out, interpret: bool
) -> tuple[jax.Array, ...]:
    """(d_q, d_k, and of parts of keys, float32: the gradients of beta and of sums of logarithms of decays by states
    [parts, B, N, T], and what the sum of each chunk is asked for besides [parts, B, N, n])."""
    (B, T, K, H), N, n = q.shape, d_out.shape[2], rates.left.shape[-1]
    parts = H // min(H, KEYS)
    made = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k)]
    made += [jax.ShapeDtypeStruct((parts, B, N, many), jnp.float32) for many in (T, T, n)]
    how = _how("delta_reads_back", (K * parts, T // ROWS, B), 8, 1, interpret)
    call = pl.pallas_call(functools.partial(_states_of, N // K, parts), made, **how)
    given = kept.changes, kept.states, back.after, back.asked, pairs.queries, pairs.keys, d_out
    return call(rates.h, rates.e, rates.beta, rates.left, q, k, *given)


def _states_of(group, parts, h, e, beta, left, q, k, changes, states, after, asked, by_queries, by_keys, d_out, *made):
    d_q, d_k, d_beta, sums, last = made
    which, chunk, b = (pl.program_id(axis) for axis in range(3))
    of, part, here = which // parts, which % parts, rows_of(chunk)
    width = q.shape[-1] // parts
    columns = pl.ds(part * width, width)
    queries, keys = q[b, here, of, columns], k[b, here, of, columns]

    def one(turn, carry):
        of_queries, of_keys = carry
        head = of * group + turn
        share, kept, brought = beta[b, head, here], h[b, head, here], e[b, head, here]
        before, behind = states[b, chunk, head, columns, :], after[b, chunk, head, columns, :]
        seen = kept[:, None] * triton.dot(d_out[b, here, head, :], before, trans_b=True)
        read = -kept[:, None] * triton.dot(asked[b, here, head, :], before, trans_b=True)
        written = brought[:, None] * triton.dot(changes[b, here, head, :], behind, trans_b=True)
        by_share, end = (jnp.sum(a * keys.astype(jnp.float32), axis=1) for a in (read, written))
        d_beta[part, b, head, here] = by_share
        sums[part, b, head, here] = jnp.sum(seen * queries.astype(jnp.float32), axis=1) + share * by_share - end
        held = jnp.sum(before.astype(jnp.float32) * behind.astype(jnp.float32), axis=0)
        last[part, b, head, chunk] = jnp.sum(end) + left[b, head, chunk] * jnp.sum(held)
        return of_queries + seen, of_keys + (written + share[:, None] * read)

    begin = jnp.zeros((ROWS, width), jnp.float32), jnp.zeros((ROWS, width), jnp.float32)
    of_queries, of_keys = jax.lax.fori_loop(0, group, one, begin)
    seen, same = by_queries[b, here, of, :], by_keys[b, here, of, :]
    d_q[b, here, of, columns] = (of_queries + triton.dot(seen, keys)).astype(d_q.dtype)
    of_keys += triton.dot(seen, queries, trans_a=True)
    of_keys += triton.dot(same, keys) + triton.dot(same, keys, trans_a=True)
    d_k[b, here, of, columns] = of_keys.astype(d_k.dtype)
