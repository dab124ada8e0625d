"""Mamba 2's rule over rows of tokens (summed_states.py) on NVIDIA GPUs: two Pallas kernels, by way of Triton, as its
own (github.com/state-spaces/mamba, ops/triton/ssd_combined.py) and flash-linear-attention's are. One carries states
from chunk to chunk, the other makes the outputs of a chunk from the state before it and from its tokens. Queries, keys
and values are read where they lie, and what tokens see of each other is nowhere written, which XLA writes several
times. Gradients: summed_back_kernel.py."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.summed_sizes import ROWS, has_kernels

COLUMNS = 32  # of a state, which do not need each other


class Rates(NamedTuple):
    """What is taken of the tokens of rows cut into n chunks, float32 [B, N, T] but for `left` and `text`. With D, h, e
    and l of summed_states.py:

    steps, rest  whose sum is that of the logarithms of decays in the token's chunk, up to it
    h            what is left there of the state before the chunk
    e            what is left of the token behind the chunk
    beta         of its value
    left         [B, N, n], l of each chunk
    text         int32 [B, T]
    """

    steps: jax.Array
    rest: jax.Array
    h: jax.Array
    e: jax.Array
    beta: jax.Array
    left: jax.Array
    text: jax.Array

    @property
    def chunk(self) -> int:
        return self.h.shape[-1] // self.left.shape[-1]


def fits(q: jax.Array, v: jax.Array, chunk: int) -> bool:
    """Whether there are kernels for q [B, T, K, H] and v [B, T, N, V] in chunks of so many tokens: by their sizes, and
    counted in 32 bits."""
    (B, T, _, H), (N, V) = q.shape, v.shape[2:]
    states = B * N * H * V * -(-T // chunk)
    whole = has_kernels(chunk, H, V, v.dtype.itemsize) and q.dtype == v.dtype
    return whole and max(states, v.size, q.size) < 2**31


def outputs(q, k, v, rates: Rates, state, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """q and k [B, T, K, H], v [B, T, N, V], T whole chunks, and state float32 [B, N, H, V]. Returns (out [B, T, N, V],
    the state of the last text). `interpret` runs it anywhere, slowly."""
    states, last = carried(k, v, rates.e * rates.beta, rates.left, state, interpret=interpret)
    return read(q, k, v, rates, states, interpret), last


def read(q, k, v, rates: Rates, states, interpret: bool = False) -> jax.Array:
    """What queries read of the state before their chunk, states [B, n, N, H, V], and of what its tokens bring."""
    (B, T, N, _), group = v.shape, v.shape[2] // k.shape[2]
    kernel = functools.partial(_outputs, rates.chunk, group)
    options = triton.CompilerParams(num_warps=4, num_stages=1)  # two turns of a loop at most
    how = {"grid": (N, T // ROWS, B), "compiler_params": options}
    made = jax.ShapeDtypeStruct(v.shape, v.dtype)
    call = pl.pallas_call(kernel, made, interpret=interpret, name="summed_outputs", **how)
    return call(*rates, q, k, v, states)


def carried(
    by, values, weights, left, state, beside=None, back: bool = False, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """state <- left state + by^T (weights values), of each chunk after the other, or (`back`) from the last to the
    first: by [B, T, K, H], values [B, T, N, V], weights [B, N, T], left [B, N, n] and state [B, N, H, V] float32.
    Returns (the state that each chunk is given [B, n, N, H, V], in the type of values, the last one that is made,
    float32) and, with `beside` as the first of these, for each chunk its product with the state that is given, [B, N,
    n] float32."""
    (B, T, N, V), (K, H), n = values.shape, by.shape[2:], left.shape[-1]
    grid = B, N, V // COLUMNS
    kernel = functools.partial(_carried, n, T // n, N // K, back, beside is not None)
    made = [jax.ShapeDtypeStruct((B, n, N, H, V), values.dtype), jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    made += [] if beside is None else [jax.ShapeDtypeStruct((*grid, n), jnp.float32)]
    options = triton.CompilerParams(num_warps=4, num_stages=2)  # of 3 a multiprocessor has room for one program
    how = {"grid": grid, "compiler_params": options, "interpret": interpret, "name": "summed_states"}
    given = by, values, weights, left, state, *(() if beside is None else (beside,))
    states, last, *products = pl.pallas_call(kernel, made, **how)(*given)
    return states, last, *(jnp.sum(a, axis=2) for a in products)


def _carried(n, chunk, group, back, has_beside, by, values, weights, left, state, *rest):
    b, head, part = (pl.program_id(axis) for axis in range(3))
    columns = pl.ds(part * COLUMNS, COLUMNS)
    beside, (states, last, *products) = (rest[0], rest[1:]) if has_beside else (None, rest)

    def step(turn, held):
        at = n - 1 - turn if back else turn
        here = pl.ds(at * chunk, chunk)
        states[b, at, head, :, columns] = held.astype(states.dtype)
        if has_beside:
            product = beside[b, at, head, :, columns].astype(jnp.float32) * held
            products[0][b, head, part, at] = jnp.sum(jnp.sum(product, axis=0))  # jax 0.11 takes one axis at a time
        weighted = (weights[b, head, here][:, None] * values[b, here, head, columns]).astype(values.dtype)
        return left[b, head, at] * held + triton.dot(by[b, here, head // group, :], weighted, trans_a=True)

    last[b, head, :, columns] = jax.lax.fori_loop(0, n, step, state[b, head, :, columns])


def _outputs(chunk, group, steps, rest, h, e, beta, left, text, q, k, v, states, out):
    del e, left
    head, piece, b = (pl.program_id(axis) for axis in range(3))
    tile = Tile(chunk, b, (steps, rest, text))
    queries, keys_of = q[b, rows_of(piece), head // group, :], head // group
    held = triton.dot(queries, states[b, tile.chunk_of(piece), head, :, :])

    def keys(other, made):
        here = rows_of(other)
        seen = triton.dot(queries, k[b, here, keys_of, :], trans_b=True)
        seen *= tile.decays(head, piece, other) * beta[b, head, here][None]
        return made + triton.dot(seen.astype(v.dtype), v[b, here, head, :])

    made = h[b, head, rows_of(piece)][:, None] * held
    made = jax.lax.fori_loop(tile.first(piece), piece + 1, keys, made)
    out[b, rows_of(piece), head, :] = made.astype(out.dtype)


def rows_of(piece) -> pl.Slice:
    return pl.ds(piece * ROWS, ROWS)


class Tile(NamedTuple):
    """Pieces of ROWS tokens of a row `b` in a kernel; sums: steps, rest and text of Rates."""

    chunk: int
    b: jax.Array
    sums: tuple

    @property
    def pieces(self) -> int:
        """Of a chunk."""
        return self.chunk // ROWS

    def chunk_of(self, piece):
        return piece // self.pieces

    def first(self, piece):
        """Of its chunk."""
        return piece // self.pieces * self.pieces

    def decays(self, head, queries, keys, of_keys: bool = False) -> jax.Array:
        """D of the tokens of two pieces of a chunk, [ROWS of queries, ROWS of keys]; turned, if `of_keys`."""
        b, (first, second) = self.b, (keys, queries) if of_keys else (queries, keys)
        steps, rest, text = self.sums
        x, y, place = rows_of(first), rows_of(second), jnp.arange(ROWS)
        between = steps[b, head, x][:, None] - steps[b, head, y][None]
        between += rest[b, head, x][:, None] - rest[b, head, y][None]
        ahead = (first * ROWS + place)[:, None] - (second * ROWS + place)[None]
        between, ahead = (-between, -ahead) if of_keys else (between, ahead)
        there = (ahead >= 0) & (text[b, x][:, None] == text[b, y][None])
        return jnp.exp(jnp.where(there, between, -jnp.inf))
