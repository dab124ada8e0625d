"""Products of few rows with weights in 16 bits on NVIDIA GPUs: a Pallas kernel, by way of Triton, that normalises rows
while it multiplies them, and gates what it made. Reading weights is what decoding does; norms and activations between
products are kernels of their own to XLA, each about as long as it takes to start one.

A program takes some columns of a weight, or of two whose results gate each other, and a part of what is summed over.
Rows are normalised behind the product: the norm's scale multiplies what is summed, and the root of the mean square,
which the same loop sums up, the result. A weight's own shape says how many parts there are, and not the number of rows,
so that a row's sum is the same beside any others of as many tiles. Columns are the rows of the product, as a Hopper's
tensor cores take at least 64 of these from shared memory: with 64 rows gate and up take 59 us so and 83 the other way
(H200, measured), with 2 rows 54 both.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.cudnn_heads import traced_is
from shardlm.ops.few_rows import COLUMNS, FEWER_STAGES, STAGES, STEP, TIGHT, TILE, Norm, Sizes, blocks_of
from shardlm.ops.swiglu import Activation, activate


def side_by_side(
    x: jax.Array, weights: Sequence[jax.Array], norm: Norm | None, sizes: Sizes, interpret: bool
) -> tuple[list[jax.Array], jax.Array | None]:
    """(float32 [splits, M, F] of each weight [K, F], the parts of x [M, K] times it, where there is a norm without the
    division by the root of the mean square; the parts [splits, M] of the sum of squares, if there is)."""
    M, S = x.shape[0], sizes.splits
    out = [jax.ShapeDtypeStruct((S, M, w.shape[1]), jnp.float32) for w in weights]
    squares = [jax.ShapeDtypeStruct((S, M), jnp.float32)] if norm else []
    run = pl.pallas_call(
        functools.partial(_side_by_side, sizes, len(weights), norm and norm.offset),
        [*out, *squares],
        grid=(sum(blocks_of(w.shape[1]) for w in weights), S),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=STAGES),
        interpret=interpret,
        name="few_rows",
    )
    made = run(x, *weights, *([norm.scale] if norm else []))
    return made[: len(out)], made[-1] if norm else None


def gated_pair(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    norm: Norm | None,
    activation: Activation,
    sizes: Sizes,
    interpret: bool,
) -> jax.Array:
    """[M, F] in x's dtype of x [M, K] and two weights [K, F]."""
    stages = FEWER_STAGES if traced_is(*TIGHT) else STAGES
    run = pl.pallas_call(
        functools.partial(_gated, sizes, norm and (norm.eps, norm.offset), activation),
        jax.ShapeDtypeStruct((x.shape[0], gate.shape[1]), x.dtype),
        grid=(blocks_of(gate.shape[1]),),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=stages),
        interpret=interpret,
        name="few_rows_gated",
    )
    return run(x, gate, up, *([norm.scale] if norm else []))


def _side_by_side(sizes: Sizes, count: int, offset: float | None, x, *refs):
    weights, rest = refs[:count], refs[count:]
    scale, out = (None, rest) if offset is None else (rest[0], rest[1:])
    block, split = pl.program_id(0), pl.program_id(1)
    row, here = _rows(sizes)

    def of(weight, made, first):
        column, inside = _columns(block - first, weight)
        (sums,), squares = _summed(sizes, x, (weight,), scale, offset, column, inside, split)
        _store(made.at[split, row[:, None], column[None]], sums, _both(here, inside))
        if scale is not None and first == 0:

            @pl.when(block == 0)
            def _():
                _store(out[-1].at[split, row], squares, None if here is None else here[:, 0])

    first = 0
    for weight, made in zip(weights, out, strict=False):
        beyond = first + blocks_of(weight.shape[1])
        pl.when((block >= first) & (block < beyond))(functools.partial(of, weight, made, first))
        first = beyond


def _gated(sizes: Sizes, norm: tuple[float, float] | None, activation: Activation, x, gate, up, *refs):
    scale, out = (None, *refs) if norm is None else refs
    column, inside = _columns(pl.program_id(0), gate)
    offset = norm and norm[1]
    (of_gate, of_up), squares = _summed(sizes, x, (gate, up), scale, offset, column, inside, 0)
    if norm is not None:
        inverse = jax.lax.rsqrt(squares / sizes.summed + norm[0])[:, None]
        of_gate, of_up = of_gate * inverse, of_up * inverse
    row, here = _rows(sizes)
    made = activate(of_gate, activation) * of_up
    _store(out.at[row[:, None], column[None]], made, _both(here, inside))


def _summed(sizes: Sizes, x, weights, scale, offset, column, inside, split):
    """(float32 [block_rows, COLUMNS] of each weight, [block_rows] of the squares) over the steps of one part."""
    row, here = _rows(sizes)

    def step(i, carry):
        sums, squares = carry
        k = i * STEP + jnp.arange(STEP)
        there = None if sizes.summed % STEP == 0 else k < sizes.summed
        factor = _load(x.at[row[:, None], k[None]], _both(here, there))
        if scale is not None:
            wide = factor.astype(jnp.float32)
            squares += jnp.sum(wide * wide, axis=1)
            by = _load(scale.at[k], there).astype(jnp.float32)
            factor = (wide * (by + offset if offset else by)[None]).astype(factor.dtype)
        mask = _both(None if there is None else there[:, None], inside)
        numbers = [_load(weight.at[k[:, None], column[None]], mask) for weight in weights]
        return tuple(a + _dot(w.T, factor.T) for a, w in zip(sums, numbers, strict=True)), squares

    rows, steps = _block_rows(sizes), pl.cdiv(sizes.summed, STEP)
    share = pl.cdiv(steps, sizes.splits)
    first = split * share
    empty = jnp.zeros((COLUMNS, rows), jnp.float32)
    start = (empty,) * len(weights), jnp.zeros(rows, jnp.float32)
    sums, squares = jax.lax.fori_loop(first, jnp.minimum(first + share, steps), step, start)
    return [a.T for a in sums], squares


def _rows(sizes: Sizes) -> tuple[jax.Array, jax.Array | None]:
    """(numbers of a program's rows, which of them there are [rows, 1]; None: all)."""
    count = _block_rows(sizes)
    row = jnp.arange(count)
    return row, None if sizes.rows == count else (row < sizes.rows)[:, None]


def _block_rows(sizes: Sizes) -> int:
    return max(TILE, pl.next_power_of_2(sizes.rows))


def _columns(block, weight) -> tuple[jax.Array, jax.Array | None]:
    """(numbers of a program's columns, which of them there are [1, COLUMNS]; None: all)."""
    columns = weight.shape[1]
    column = block * COLUMNS + jnp.arange(COLUMNS)
    return column, None if columns % COLUMNS == 0 else (column < columns)[None]


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _load(ref, mask: jax.Array | None) -> jax.Array:
    """Zero beyond the mask."""
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=0)


def _store(ref, value: jax.Array, mask: jax.Array | None) -> None:
    triton.store(ref, value.astype(ref.dtype), mask=mask)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Where both are; None is everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
