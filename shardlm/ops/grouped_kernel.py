"""Products of few rows with weights in few bits on NVIDIA GPUs: a Pallas kernel, by way of Triton, that reads a weight
once, as it is held, and makes its numbers where they are multiplied. Reading weights is what decoding does; XLA would
write all of them in 16 bits and read them again.

A program takes some columns and a part of what is summed over, a group at a time: the numbers of a group are exact in
16 bits, so that its scale multiplies sums, in float32. A weight's own shape says how many parts there are, and not the
number of rows, so that a row's sum is the same beside any others.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.grouped_weights import COLUMNS, WeightFormat, numbers_a_byte, splits_of
from shardlm.ops.paged_kernel import from_fp8

ROWS = 128  # of a program, at most


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when compiling.

    rows, summed, columns  of x [rows, summed] times W [summed, columns]
    group                  of the numbers summed over, those that share a scale
    how                    they are held
    """

    rows: int
    summed: int
    columns: int
    group: int
    how: WeightFormat

    @property
    def held(self) -> int:
        """Bytes of a group in each column: as many numbers are multiplied at a time."""
        return self.group // numbers_a_byte(self.how)

    @property
    def block_rows(self) -> int:
        return min(ROWS, max(16, pl.next_power_of_2(self.rows)))

    @property
    def blocks(self) -> int:
        """Of columns."""
        return pl.cdiv(self.columns, COLUMNS)

    @property
    def groups(self) -> int:
        return self.summed // self.group

    @property
    def splits(self) -> int:
        return splits_of(self.groups, self.columns)

    @property
    def share(self) -> int:
        """Groups of a part."""
        return pl.cdiv(self.groups, self.splits)


def pallas(
    x: jax.Array, packed: jax.Array, scale: jax.Array, how: WeightFormat, *, interpret: bool = False
) -> jax.Array:
    """x [M, K] times a weight [K, F], whose bytes [K or K / 2, F] and scales [groups, F] are as
    grouped_weights.quantised makes them along the first dimension: [M, F] in x's dtype, summed in float32. The arrays
    are those of one device. `interpret` runs it anywhere, slowly."""
    (M, K), F = x.shape, packed.shape[1]
    sizes = Sizes(M, K, F, K // scale.shape[0], how)
    out = jax.ShapeDtypeStruct((sizes.splits, M, F), x.dtype if sizes.splits == 1 else jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_kernel, sizes),
        out,
        grid=(sizes.blocks, sizes.splits, pl.cdiv(M, sizes.block_rows)),
        compiler_params=triton.CompilerParams(num_warps=8 if sizes.block_rows > 64 else 4, num_stages=4),
        interpret=interpret,
        name="few_bits_matmul",
    )(x, packed, scale)
    return parts[0] if sizes.splits == 1 else parts.sum(axis=0).astype(x.dtype)


def _kernel(sizes: Sizes, x, packed, scale, out):
    """A block of rows and columns, and a part of the groups."""
    block, split, rows = (pl.program_id(axis) for axis in range(3))
    row = rows * sizes.block_rows + jnp.arange(sizes.block_rows)
    column = block * COLUMNS + jnp.arange(COLUMNS)
    number = jnp.arange(max(16, pl.next_power_of_2(sizes.held)))  # of the bytes of a group
    row_here = None if sizes.rows % sizes.block_rows == 0 else (row < sizes.rows)[:, None]
    column_here = None if sizes.columns % COLUMNS == 0 else (column < sizes.columns)[None]
    of_group = None if sizes.held == len(number) else number < sizes.held
    x_mask = _both(row_here, of_group if of_group is None else of_group[None])
    mask = _both(of_group if of_group is None else of_group[:, None], column_here)

    def group(i, total):
        tile = _load(packed.at[(i * sizes.held + number)[:, None], column[None]], mask)
        own = _load(scale.at[i, column[None]], column_here).astype(jnp.float32)
        sums = jnp.zeros((sizes.block_rows, COLUMNS), jnp.float32)
        for part, numbers in enumerate(_numbers(tile, sizes.how)):
            first = i * sizes.group + part * sizes.held
            at = x.at[row[:, None], (first + number)[None]]
            factor = _load(at) if x_mask is None else triton.load(at, mask=x_mask, other=0)
            sums += triton.dot(factor, numbers.astype(factor.dtype), precision=jax.lax.Precision.HIGHEST)
        return total + sums * own

    first = split * sizes.share
    stop = jnp.minimum(first + sizes.share, sizes.groups)
    total = jax.lax.fori_loop(first, stop, group, jnp.zeros((sizes.block_rows, COLUMNS), jnp.float32))
    at = out.at[split, row[:, None], column[None]]
    triton.store(at, total.astype(out.dtype), mask=_both(row_here, column_here))


def _numbers(tile: jax.Array, how: WeightFormat) -> tuple[jax.Array, ...]:
    """What the bytes of a group hold: its numbers, or of 4 bits the first half of them and the second."""
    if how == "int8":
        return (tile,)
    if how == "int4":
        return (tile << 4) >> 4, tile >> 4
    bits = jax.lax.bitcast_convert_type(tile, jnp.int8).astype(jnp.int16)
    return (from_fp8(bits),)


def _load(ref, mask: jax.Array | None = None) -> jax.Array:
    """What is beyond the mask may be any number: it meets zeros of x, or is not stored."""
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Where both are; None is everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
