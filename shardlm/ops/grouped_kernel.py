"""Products of few rows with weights in few bits on NVIDIA GPUs: a Pallas kernel, by way of Triton, that reads a weight
once, as it is held, and makes its numbers where they are multiplied. Reading weights is what decoding does; XLA would
write all of them in 16 bits and read them again.

A program takes some columns and a part of what is summed over, a group at a time or a part of one: the numbers of a
group are exact in 16 bits, so that its scale multiplies sums, in float32. Several small groups are taken together, and
their scales multiply numbers (MXFP4's are exact then too). A weight's own shape says how many parts there are, and not
the number of rows, so that a row's sum is the same beside any others.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.grouped_weights import COLUMNS, Grouped, Groups, groups_at_once, halves, splits_of, step_of
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
    how: Groups

    @property
    def several(self) -> int:
        """Groups of a step."""
        return groups_at_once(self.group, self.how.a_byte)

    @property
    def step(self) -> int:
        """Numbers that are read at a time."""
        return step_of(self.group, self.how.a_byte)

    @property
    def held(self) -> int:
        """Bytes of a step in each column: as many numbers are multiplied at a time."""
        return self.step // self.how.a_byte

    @property
    def block_rows(self) -> int:
        return min(ROWS, max(16, pl.next_power_of_2(self.rows)))

    @property
    def blocks(self) -> int:
        """Of columns."""
        return pl.cdiv(self.columns, COLUMNS)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.summed, self.step)

    @property
    def splits(self) -> int:
        return splits_of(self.steps, self.columns)

    @property
    def share(self) -> int:
        """Steps of a part."""
        return pl.cdiv(self.steps, self.splits)


def pallas(x: jax.Array, held: Grouped, how: Groups, *, interpret: bool = False) -> jax.Array:
    """x [M, K] times a weight [K, F], whose bytes [K or K / 2, F], scales and zeros [groups, F] are as grouped_weights
    makes them along the first dimension: [M, F] in x's dtype, summed in float32. The arrays are those of one device.
    `interpret` runs it anywhere, slowly."""
    (M, K), F = x.shape, held.values.shape[1]
    sizes = Sizes(M, K, F, K // held.scale.shape[0], how)
    out = jax.ShapeDtypeStruct((sizes.splits, M, F), x.dtype if sizes.splits == 1 else jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_kernel, sizes),
        out,
        grid=(sizes.blocks, sizes.splits, pl.cdiv(M, sizes.block_rows)),
        compiler_params=triton.CompilerParams(num_warps=8 if sizes.block_rows > 64 else 4, num_stages=4),
        interpret=interpret,
        name="few_bits_matmul",
    )(x, *_arrays(held))
    return parts[0] if sizes.splits == 1 else parts.sum(axis=0).astype(x.dtype)


def of_experts(
    x: jax.Array, held: Grouped, group_sizes: jax.Array, how: Groups, *, interpret: bool = False
) -> jax.Array:
    """Each row of x [n, K] times the weight of its expert, of [E, K, F] whose arrays are [E, ...]; rows and
    `group_sizes` int32 [E] as in grouped_matmul.grouped_matmul. [n, F] in x's dtype; rows of no expert are zero. An
    expert without rows is not read."""
    (n, K), (E, _, F) = x.shape, held.values.shape
    sizes = Sizes(-(-n // E), K, F, K // held.scale.shape[1], how)  # as many rows an expert as there may be on average
    ends = jnp.cumsum(group_sizes)
    y = pl.pallas_call(
        functools.partial(_expert_kernel, sizes),
        jax.ShapeDtypeStruct((n, F), x.dtype),
        grid=(sizes.blocks, E),
        compiler_params=triton.CompilerParams(num_warps=8 if sizes.block_rows > 64 else 4, num_stages=4),
        interpret=interpret,
        name="few_bits_experts",
    )(x, jnp.stack([ends - group_sizes, ends]), *_arrays(held))
    return jnp.where((jnp.arange(n) < ends[-1])[:, None], y, 0)


def _arrays(held: Grouped) -> list[jax.Array]:
    return [a for a in held if a is not None]


def _kernel(sizes: Sizes, x, *held_and_out):
    """A block of rows and columns, and a part of the steps."""
    *held, out = held_and_out
    block, split, rows = (pl.program_id(axis) for axis in range(3))
    row = rows * sizes.block_rows + jnp.arange(sizes.block_rows)
    here = None if sizes.rows % sizes.block_rows == 0 else (row < sizes.rows)[:, None]
    column, inside = _columns(sizes, block)
    first = split * sizes.share
    stop = jnp.minimum(first + sizes.share, sizes.steps)
    total = _summed(sizes, x, Grouped(*held), (row, here), block, first, stop)
    triton.store(out.at[split, row[:, None], column[None]], total.astype(out.dtype), mask=_both(here, inside))


def _expert_kernel(sizes: Sizes, x, spans, *held_and_out):
    """A block of columns of one expert, and its rows, a block after the other."""
    *held, out = held_and_out
    block, expert = (pl.program_id(axis) for axis in range(2))
    start, end = spans[0, expert], spans[1, expert]
    column, inside = _columns(sizes, block)

    def rows(i, carry):
        row = start + i * sizes.block_rows + jnp.arange(sizes.block_rows)
        here = (row < end)[:, None]
        total = _summed(sizes, x, Grouped(*held), (row, here), block, 0, sizes.steps, expert)
        triton.store(out.at[row[:, None], column[None]], total.astype(out.dtype), mask=_both(here, inside))
        return carry

    jax.lax.fori_loop(0, pl.cdiv(end - start, sizes.block_rows), rows, 0)


def _columns(sizes: Sizes, block) -> tuple[jax.Array, jax.Array | None]:
    """(columns of a block, which of them there are)."""
    column = block * COLUMNS + jnp.arange(COLUMNS)
    return column, None if sizes.columns % COLUMNS == 0 else (column < sizes.columns)[None]


def _summed(sizes: Sizes, x, held: Grouped, rows, block, first, stop, *expert) -> jax.Array:
    """float32 [block_rows, COLUMNS]: rows of x times a block of columns, over the steps from `first` up to `stop`,
    of one weight or of one expert's."""
    if sizes.several > 1:
        return _summed_small(sizes, x, held, rows, block, first, stop, *expert)
    row, row_here = rows
    column, column_here = _columns(sizes, block)
    number = jnp.arange(max(16, pl.next_power_of_2(sizes.held)))  # of the bytes of a step
    of_group = None if sizes.held == len(number) else number < sizes.held
    x_mask = _both(row_here, of_group if of_group is None else of_group[None])
    mask = _both(of_group if of_group is None else of_group[:, None], column_here)

    def step(i, total):
        group = i if sizes.step == sizes.group else jax.lax.div(i, sizes.group // sizes.step)
        tile = _load(held.values.at[*expert, (i * sizes.held + number)[:, None], column[None]], mask)
        own = _load(held.scale.at[*expert, group, column[None]], column_here).astype(jnp.float32)
        sums = jnp.zeros((sizes.block_rows, COLUMNS), jnp.float32)
        for part, numbers in enumerate(_numbers(tile, sizes.how)):
            if held.zero is not None:
                zero = _load(held.zero.at[*expert, group, column[None]], column_here)
                numbers = numbers.astype(jnp.float32) - zero.astype(jnp.float32)
            begin = i * sizes.step + part * sizes.held
            at = x.at[row[:, None], (begin + number)[None]]
            factor = _load(at, x_mask, 0)
            sums += triton.dot(factor, numbers.astype(factor.dtype), precision=jax.lax.Precision.HIGHEST)
        return total + sums * own

    return jax.lax.fori_loop(first, stop, step, jnp.zeros((sizes.block_rows, COLUMNS), jnp.float32))


def _summed_small(sizes: Sizes, x, held: Grouped, rows, block, first, stop, *expert) -> jax.Array:
    """As `_summed`, of several groups at a time; the last of them may be fewer."""
    row, row_here = rows
    column, column_here = _columns(sizes, block)
    each, whole = sizes.group // sizes.how.a_byte, sizes.summed % sizes.step == 0
    number, nth = jnp.arange(sizes.held), jnp.arange(sizes.several)

    def of_groups(a, group, here):
        own = _load(a.at[*expert, group[:, None], column[None]], _both(here, column_here), 0)
        own = own.astype(jnp.float32)[:, None]
        return jnp.broadcast_to(own, (sizes.several, each, COLUMNS)).reshape(sizes.held, COLUMNS)

    def step(i, total):
        byte, group = i * sizes.held + number, i * sizes.several + nth
        here = None if whole else byte < sizes.summed // sizes.how.a_byte
        there = None if whole else (group < sizes.summed // sizes.group)[:, None]
        mask = _both(here if here is None else here[:, None], column_here)
        tile = _load(held.values.at[*expert, byte[:, None], column[None]], mask)
        scale = of_groups(held.scale, group, there)
        zero = None if held.zero is None else of_groups(held.zero, group, there)
        for part, numbers in enumerate(_numbers(tile, sizes.how)):
            w = numbers.astype(jnp.float32) if zero is None else numbers.astype(jnp.float32) - zero
            at = jax.lax.div(byte, each) * sizes.group + part * each + jax.lax.rem(byte, each)
            x_mask = _both(row_here, here if here is None else here[None])
            factor = _load(x.at[row[:, None], at[None]], x_mask, 0)
            w = (w * scale).astype(factor.dtype)
            total += triton.dot(factor, w, precision=jax.lax.Precision.HIGHEST)
        return total

    return jax.lax.fori_loop(first, stop, step, jnp.zeros((sizes.block_rows, COLUMNS), jnp.float32))


def _numbers(tile: jax.Array, how: Groups) -> tuple[jax.Array, ...]:
    """What the bytes of a step hold: its numbers, or of 4 bits the first half of them and the second."""
    if how.numbers == "int8":
        return (tile,)
    if how.a_byte == 2:
        return halves(tile, how.numbers)
    bits = jax.lax.bitcast_convert_type(tile, jnp.int8).astype(jnp.int16)
    return (from_fp8(bits),)


def _load(ref, mask: jax.Array | None = None, other: int | None = None) -> jax.Array:
    """What is beyond the mask is `other`, or may be any number, as what meets zeros of x, or is not stored."""
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=other)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Where both are; None is everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
