"""The gated delta rule over rows of tokens (gated_delta_chunks.py) on NVIDIA GPUs: Pallas kernels, by way of Triton, as
flash-linear-attention has them (github.com/fla-org/flash-linear-attention, ops/gated_delta_rule/wy_fast.py and
ops/common/chunk_delta_h.py). One makes U and W of each chunk and head, whose systems of equations stay in registers;
one carries states from chunk to chunk and leaves what tokens change where U was; outputs are made by Mamba 2's
(summed_kernel.py), of changes instead of values. Queries, keys and values are read where they lie. Gradients:
gated_delta_back_kernel.py."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops import summed_kernel
from shardlm.ops.gated_delta_sizes import BLOCK, has_kernels
from shardlm.ops.summed_kernel import COLUMNS, Rates, Tile, rows_of
from shardlm.ops.summed_sizes import ROWS

ALONE = 132  # multiprocessors of an H100


def fits(q: jax.Array, v: jax.Array, chunk: int) -> bool:
    """Whether there are kernels for q [B, T, K, H] and v [B, T, N, V] in chunks of so many tokens: by their sizes, and
    counted in 32 bits."""
    (B, T, _, H), (N, V) = q.shape, v.shape[2:]
    most = B * T * N * max(V, -(-H * V // chunk), H, chunk)
    return has_kernels(chunk, H, V, v.dtype.itemsize) and q.dtype == v.dtype and most < 2**31


class Kept(NamedTuple):
    """What gradients are made from beside the arguments, in the type of values: (I + L)^-1 of each chunk [B, T, N,
    ROWS], what tokens change [B, T, N, V], and the state that each chunk is given [B, n, N, H, V]."""

    inverse: jax.Array
    changes: jax.Array
    states: jax.Array


def outputs(q, k, v, rates: Rates, state, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """q and k [B, T, K, H], v [B, T, N, V], T whole chunks of ROWS, and state float32 [B, N, H, V]. Returns (out
    [B, T, N, V], the state of the last text). `interpret` runs it anywhere, slowly."""
    return _outputs(q, k, rates, state, changes_of_empty(k, v, rates, interpret=interpret), interpret)[:2]


def kept_outputs(q, k, v, rates: Rates, state, interpret: bool = False) -> tuple[jax.Array, jax.Array, Kept]:
    """As `outputs`, bit for bit, and what is kept for gradients."""
    *made, inverse = changes_of_empty(k, v, rates, keep=True, interpret=interpret)
    *found, changes, states = _outputs(q, k, rates, state, made, interpret)
    return *found, Kept(inverse, changes, states)


def _outputs(q, k, rates: Rates, state, made, interpret: bool) -> tuple[jax.Array, ...]:
    states, changes, last = carried(k, *made, rates, state, interpret)
    out = summed_kernel.read(q, k, changes, rates._replace(beta=jnp.ones_like(rates.beta)), states, interpret)
    return out, last, changes, states


def changes_of_empty(k, v, rates: Rates, keep: bool = False, interpret: bool = False) -> tuple[jax.Array, ...]:
    """U [B, T, N, V] and W [B, T, N, H], in the type of k and v; to keep, (I + L)^-1 too."""
    (B, T, N, _), (K, H) = v.shape, k.shape[2:]
    made = [jax.ShapeDtypeStruct(shape, v.dtype) for shape in (v.shape, (B, T, N, H), (B, T, N, ROWS))[: 2 + keep]]
    how = {"grid": (N, T // ROWS, B), "compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    kernel = functools.partial(_changes, N // K)
    call = pl.pallas_call(kernel, made, interpret=interpret, name="delta_changes", **how)
    return call(rates.steps, rates.rest, rates.text, rates.beta, rates.h, k, v)


def _changes(group, steps, rest, text, beta, h, k, v, U, W, *kept):
    head, chunk, b = (pl.program_id(axis) for axis in range(3))
    tile, here, of = Tile(ROWS, b, (steps, rest, text)), rows_of(chunk), head // group
    keys, share, place = k[b, here, of, :], beta[b, head, here], jnp.arange(ROWS)
    taken = triton.dot(keys, keys, trans_b=True) * tile.decays(head, chunk, chunk) * share[:, None]
    inverse = inverse_of_unit(jnp.where(place[:, None] > place[None], taken, 0.0))
    for whole in kept:
        whole[b, here, head, :] = inverse.astype(whole.dtype)
    by_values = (inverse * share[None]).astype(v.dtype)
    by_keys = (inverse * (share * h[b, head, here])[None]).astype(k.dtype)
    U[b, here, head, :] = triton.dot(by_values, v[b, here, head, :]).astype(U.dtype)
    W[b, here, head, :] = triton.dot(by_keys, keys).astype(W.dtype)


def inverse_of_unit(lower: jax.Array) -> jax.Array:
    """As unit_inverse's, of one matrix [C, C] in a kernel: blocks on the diagonal by substitution, a row of all of them
    after the other, and pairs of larger ones as products of whole matrices."""
    C = lower.shape[-1]
    place = jnp.arange(C)
    size = min(BLOCK, C)
    inverse = _blocks(lower, size)
    while size < C:
        row, column = place[:, None] // size, place[None] // size
        corners = jnp.where((row % 2 == 1) & (column == row - 1), lower, 0.0)
        inverse -= _product(_product(inverse, corners), inverse)
        size *= 2
    return inverse


def _blocks(lower: jax.Array, size: int) -> jax.Array:
    """[C, C], of whose blocks on the diagonal it is the inverses."""
    C = lower.shape[-1]
    count, place = C // size, jnp.arange(size)
    block = jnp.arange(count)
    own = (block[:, None] == block[None])[:, None, :, None]
    blocks = jnp.sum(jnp.where(own, lower.reshape(count, size, count, size), 0.0), axis=2)
    turned = jnp.swapaxes(blocks, 1, 2)
    inverse = jnp.where(place[:, None] == place[None], 1.0, jnp.zeros_like(blocks))
    for row in range(1, size):
        taken = jnp.sum(jnp.where(place == row, turned, 0.0), axis=2)  # of each row before it
        made = jnp.sum(taken[:, :, None] * inverse, axis=1)
        inverse -= jnp.where(place[:, None] == row, made[:, None, :], 0.0)
    return jnp.where(own, inverse[:, :, None, :], 0.0).reshape(C, C)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of float32, whose numbers are two of bfloat16 each. What is left out, products of both second ones, is 2**-14 of
    the whole at most; the inverse is rounded to 2**-9 of itself."""
    (a, a_rest), (b, b_rest) = _halves(a), _halves(b)
    return triton.dot(a, b) + (triton.dot(a_rest, b) + triton.dot(a, b_rest))


def _halves(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first is cut and not rounded, by its bits: one number at a time is converted to 16 bits and back at half the
    rate of others (172 of 3,384 instructions; compiled for an H100)."""
    bits = jax.lax.bitcast_convert_type(a, jnp.int32) & -(1 << 16)
    first = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return first.astype(jnp.bfloat16), (a - first).astype(jnp.bfloat16)


def carried(k, U, W, rates: Rates, state, interpret: bool = False) -> tuple[jax.Array, ...]:
    """S <- l S + (e k)^T (U - W S) of each chunk after the other. Returns (the state that each chunk is given
    [B, n, N, H, V], what its tokens change, U - W S, in U's place and type, the last state that is made, float32)."""
    (B, _, N, V), (K, H), n = U.shape, k.shape[2:], rates.left.shape[-1]
    made = [jax.ShapeDtypeStruct((B, n, N, H, V), U.dtype), jax.ShapeDtypeStruct(U.shape, U.dtype)]
    made += [jax.ShapeDtypeStruct(state.shape, jnp.float32)]
    grid = B, N, V // COLUMNS
    options = triton.CompilerParams(num_warps=4, num_stages=stages_of(grid))
    how = {"grid": grid, "compiler_params": options, "input_output_aliases": {3: 1}}
    kernel = functools.partial(_carried, n, N // K)
    call = pl.pallas_call(kernel, made, interpret=interpret, name="delta_states", **how)
    return call(rates.e, rates.left, k, U, W, state)


def stages_of(grid: tuple[int, ...]) -> int:
    """Where programs are no more than multiprocessors, each looks two chunks ahead; of 3 stages there is room for
    one."""
    return 3 if math.prod(grid) <= ALONE else 2


def _carried(n, group, e, left, k, U, W, state, states, changes, last):
    b, head, part = (pl.program_id(axis) for axis in range(3))
    columns = pl.ds(part * COLUMNS, COLUMNS)

    def step(chunk, held):
        here, given = rows_of(chunk), held.astype(U.dtype)
        states[b, chunk, head, :, columns] = given
        change = U[b, here, head, columns].astype(jnp.float32) - triton.dot(W[b, here, head, :], given)
        changes[b, here, head, columns] = change.astype(U.dtype)
        kept = (e[b, head, here][:, None] * change).astype(U.dtype)
        return left[b, head, chunk] * held + triton.dot(k[b, here, head // group, :], kept, trans_a=True)

    last[b, head, :, columns] = jax.lax.fori_loop(0, n, step, state[b, head, :, columns])
