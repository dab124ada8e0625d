"""Products of few rows with weights in few bits on NVIDIA GPUs: a Pallas kernel, by way of Triton, that reads a weight
once, as it is held, and makes its numbers where they are multiplied. Reading weights is what decoding does; XLA would
write all of them in 16 bits and read them again.

A program takes some columns and a part of what is summed over, a group at a time or a part of one: the numbers of a
group are exact in 16 bits, so that its scale multiplies sums, in float32. Several small groups are taken together, and
their scales multiply numbers (MXFP4's are exact then too). A weight's own shape says how many parts there are, and not
the number of rows, so that a row's sum is the same beside any others.

Bytes are read four at a time, of columns that lie together (`lanes`), and each of the four is a product of its own: so
a number takes two instructions (packed_numbers.py), where bytes that are read, unpacked and moved one by one took ten.
Rows are multiplied 16 at a time, however many there are: they share the numbers made, and each has the same sums.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops import packed_numbers
from shardlm.ops.grouped_weights import (
    COLUMNS,
    ROWS,
    Grouped,
    Groups,
    groups_at_once,
    parts_written,
    splits_of,
    splits_of_experts,
    step_of,
)

TILE = 16  # rows of one product
LANES = 4  # columns in an element, where they divide so


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when compiling.

    rows, summed, columns  of x [rows, summed] times W [summed, columns]
    group                  of the numbers summed over, those that share a scale
    how                    they are held
    splits                 parts that are summed up apart
    together               whether a program goes through all of them, and adds them in their order
    compiled               for a GPU, or else interpreted
    """

    rows: int
    summed: int
    columns: int
    group: int
    how: Groups
    splits: int
    together: bool
    compiled: bool

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
    def tiles(self) -> int:
        """Of the rows of a program; with more than one of those, as many in each."""
        return pl.cdiv(pl.cdiv(self.rows, pl.cdiv(self.rows, ROWS)), TILE)

    @property
    def block_rows(self) -> int:
        return TILE * self.tiles

    @property
    def lanes(self) -> int:
        return math.gcd(LANES, self.columns)

    @property
    def wide(self) -> int:
        """Elements of a program's columns."""
        return COLUMNS // self.lanes

    @property
    def blocks(self) -> int:
        """Of columns."""
        return pl.cdiv(self.columns, COLUMNS)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.summed, self.step)

    @property
    def share(self) -> int:
        """Steps of a part."""
        return pl.cdiv(self.steps, self.splits)

    @property
    def options(self) -> triton.CompilerParams:
        return triton.CompilerParams(num_warps=4, num_stages=5 if self.tiles <= 2 else 3)


class Where(NamedTuple):
    """What a program works at.

    rows    int32 [TILE] of each of its tiles, and which of them there are, [TILE, 1] or None: all
    word    int32 [wide], its columns' elements, and which of them there are, or None
    expert  the first index of the arrays, where these are of several
    """

    rows: tuple[tuple[jax.Array, jax.Array | None], ...]
    word: tuple[jax.Array, jax.Array | None]
    expert: tuple[jax.Array, ...] = ()


def pallas(x: jax.Array, held: Grouped, how: Groups, *, interpret: bool = False) -> jax.Array:
    """x [M, K] times a weight [K, F], whose bytes [K or K / 2, F], scales and zeros [groups, F] are as grouped_weights
    makes them along the first dimension: [M, F] in x's dtype, summed in float32. The arrays are those of one device.
    `interpret` runs it anywhere, slowly."""
    (M, K), F = x.shape, held.values.shape[1]
    group = K // held.scale.shape[0]
    splits, written = splits_of(K, F), parts_written(K, F, M)
    sizes = Sizes(M, K, F, group, how, splits, written < splits, not interpret)
    out = jax.ShapeDtypeStruct((written, M, F), x.dtype if written == 1 else jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_kernel, sizes),
        out,
        grid=(pl.cdiv(M, sizes.block_rows), sizes.blocks, written),  # blocks of rows read a weight at the same time
        compiler_params=sizes.options,
        interpret=interpret,
        name="few_bits_matmul",
    )(x, *_arrays(held, sizes))
    return _summed_up(parts, x.dtype)


def of_experts(
    x: jax.Array, held: Grouped, group_sizes: jax.Array, how: Groups, *, interpret: bool = False
) -> jax.Array:
    """Each row of x [n, K] times the weight of its expert, of [E, K, F] whose arrays are [E, ...]; rows and
    `group_sizes` int32 [E] as in grouped_matmul.grouped_matmul. [n, F] in x's dtype; rows of no expert are zero. An
    expert without rows is not read."""
    (n, K), (E, _, F) = x.shape, held.values.shape
    group = K // held.scale.shape[1]
    splits = splits_of_experts(K, F, n, E)
    sizes = Sizes(_of_expert(n, E), K, F, group, how, splits, False, not interpret)
    ends = jnp.cumsum(group_sizes)
    parts = pl.pallas_call(
        functools.partial(_expert_kernel, sizes),
        jax.ShapeDtypeStruct((splits, n, F), x.dtype if splits == 1 else jnp.float32),
        grid=(sizes.blocks, splits, E),
        compiler_params=sizes.options,
        interpret=interpret,
        name="few_bits_experts",
    )(x, jnp.stack([ends - group_sizes, ends]), *_arrays(held, sizes))
    return jnp.where((jnp.arange(n) < ends[-1])[:, None], _summed_up(parts, x.dtype), 0)


def _summed_up(parts: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """In their order."""
    return functools.reduce(jnp.add, parts).astype(dtype)


def _of_expert(rows: int, experts: int) -> int:
    """Rows for which an expert's weight is read once: few have more than twice the root above the average."""
    average = rows / experts
    return min(ROWS, math.ceil(average + 2 * average**0.5))


def _arrays(held: Grouped, sizes: Sizes) -> list[jax.Array]:
    """The bytes as elements of `lanes` columns: no copy, and fewer of them than Pallas counts in 32 bits."""
    values, *rest = held
    element = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32}[sizes.lanes]
    values = values.reshape(*values.shape[:-1], -1, sizes.lanes) if sizes.lanes > 1 else values
    return [jax.lax.bitcast_convert_type(values, element), *(a for a in rest if a is not None)]


def _kernel(sizes: Sizes, x, *held_and_out):
    """A block of rows and columns, and a part of the steps."""
    *held, out = held_and_out
    rows, block, split = (pl.program_id(axis) for axis in range(3))
    where = Where(_tiles(sizes, rows * sizes.block_rows, sizes.rows), _words(sizes, block))
    _summed(sizes, x, Grouped(*held), where, split, out)


def _expert_kernel(sizes: Sizes, x, spans, *held_and_out):
    """A block of columns of one expert and a part of the steps, and its rows, a block after the other."""
    *held, out = held_and_out
    block, split, expert = (pl.program_id(axis) for axis in range(3))
    start, end = spans[0, expert], spans[1, expert]

    def rows(i, carry):
        tiles = _tiles(sizes, start + i * sizes.block_rows, end)
        _summed(sizes, x, Grouped(*held), Where(tiles, _words(sizes, block), (expert,)), split, out)
        return carry

    jax.lax.fori_loop(0, pl.cdiv(end - start, sizes.block_rows), rows, 0)


def _tiles(sizes: Sizes, first, end) -> tuple[tuple[jax.Array, jax.Array | None], ...]:
    """Of rows from the first on, those before the end."""
    whole = isinstance(end, int) and end % sizes.block_rows == 0
    rows = [first + tile * TILE + jnp.arange(TILE) for tile in range(sizes.tiles)]
    return tuple((row, None if whole else (row < end)[:, None]) for row in rows)


def _words(sizes: Sizes, block) -> tuple[jax.Array, jax.Array | None]:
    word = block * sizes.wide + jnp.arange(sizes.wide)
    return word, None if sizes.columns % COLUMNS == 0 else word < sizes.columns // sizes.lanes


def _summed(sizes: Sizes, x, held: Grouped, where: Where, split, out) -> None:
    """Stores rows of x times columns of a weight, over the steps of one part."""
    sums = _part(sizes, x, held, where, split)
    if sizes.together:
        sums = jax.lax.fori_loop(1, sizes.splits, lambda i, a: _added(a, _part(sizes, x, held, where, i)), sums)
    _, inside = where.word
    column = _columns(sizes, where)
    for (row, here), *lanes in zip(where.rows, *sums, strict=True):
        mask = _both(here, inside if inside is None else inside[None])
        for one, lane in zip(column, lanes, strict=True):
            triton.store(out.at[split, row[:, None], one[None]], lane.astype(out.dtype), mask=mask)


def _part(sizes: Sizes, x, held: Grouped, where: Where, split) -> tuple[tuple[jax.Array, ...], ...]:
    """float32 [TILE, wide] of each lane and tile: the sums of one part's steps."""
    first = split * sizes.share
    stop = jnp.minimum(first + sizes.share, sizes.steps)
    empty = jnp.zeros((TILE, sizes.wide), jnp.float32)
    sums = tuple((empty,) * sizes.tiles for _ in range(sizes.lanes))
    if sizes.several > 1:
        return jax.lax.fori_loop(first, stop, functools.partial(_several_groups, sizes, x, held, where), sums)
    step = functools.partial(_one_group, sizes, x, held, where)
    return jax.lax.fori_loop(first, stop, step, (sums, _scales(sizes, held, where, first)))[0]


def _added(a, b):
    return jax.tree.map(jnp.add, a, b)


def _columns(sizes: Sizes, where: Where) -> list[jax.Array]:
    """Those of each lane."""
    word, _ = where.word
    return [word * sizes.lanes + lane for lane in range(sizes.lanes)]


def _scales(sizes: Sizes, held: Grouped, where: Where, i) -> list[tuple[jax.Array, ...]]:
    """Of a step, for each lane the scale and the zero, if any."""
    group = i if sizes.step == sizes.group else jax.lax.div(i, sizes.group // sizes.step)
    arrays = [a for a in (held.scale, held.zero) if a is not None]
    _, inside = where.word
    return [tuple(_load(a.at[*where.expert, group, c], inside) for a in arrays) for c in _columns(sizes, where)]


def _one_group(sizes: Sizes, x, held: Grouped, where: Where, i, carry):
    """Adds the products of one step, whose scales were read in the step before."""
    total, scales = carry
    number = jnp.arange(max(16, pl.next_power_of_2(sizes.held)))  # of the bytes of a step
    of_group = None if sizes.held == len(number) else number < sizes.held
    following = _scales(sizes, held, where, jnp.minimum(i + 1, sizes.steps - 1))
    words = _held_words(held, where, i * sizes.held + number, of_group)
    at = [i * sizes.step + part * sizes.held + number for part in range(sizes.how.a_byte)]
    factors = [[_factor(x, row, one, of_group) for one in at] for row in where.rows]
    of_x = _of_x(factors, number, sizes.wide) if held.zero is not None else ()
    found = []
    for bits, own, so_far in zip(_bytes(sizes, words), scales, total, strict=True):
        parts = packed_numbers.numbers(bits, sizes.how.numbers, sizes.compiled)
        sums = [_product(sizes, tile, factor, parts) for tile, factor in enumerate(factors)]
        scale, *zero = (a.astype(jnp.float32) for a in own)
        sums = [one - zero[0] * x for one, x in zip(sums, of_x, strict=True)] if zero else sums
        found.append(tuple(a + one * scale for a, one in zip(so_far, sums, strict=True)))
    return tuple(found), following


def _of_x(factors: list[list[jax.Array]], number: jax.Array, wide: int) -> list[jax.Array]:
    """What x sums up to in a step, for all columns: what a zero of 1 would add. As a product, which takes a tensor core
    less than it takes to spread zeros over numbers."""
    ones = jnp.ones((len(number), wide), factors[0][0].dtype)
    return [sum(_dot(one, ones) for one in factor) for factor in factors]


def _several_groups(sizes: Sizes, x, held: Grouped, where: Where, i, total):
    """Adds the products of several groups; the last of them may be fewer."""
    each, whole = sizes.group // sizes.how.a_byte, sizes.summed % sizes.step == 0
    byte, group = i * sizes.held + jnp.arange(sizes.held), i * sizes.several + jnp.arange(sizes.several)
    here = None if whole else byte < sizes.summed // sizes.how.a_byte
    there = None if whole else (group < sizes.summed // sizes.group)[:, None]
    words = _held_words(held, where, byte, here)
    in_group = jax.lax.div(byte, each) * sizes.group + jax.lax.rem(byte, each)
    at = [in_group + part * each for part in range(sizes.how.a_byte)]
    factors = [[_factor(x, row, one, here) for one in at] for row in where.rows]
    _, inside = where.word

    def of_groups(a, column, dtype):
        mask = _both(there, inside if inside is None else inside[None])
        own = _load(a.at[*where.expert, group[:, None], column[None]], mask, 0).astype(dtype)
        wide = jnp.broadcast_to(own[:, None], (sizes.several, each, sizes.wide))
        return wide.reshape(sizes.held, sizes.wide)

    exact = held.zero is None and held.scale.dtype == jnp.bfloat16
    found = []
    for bits, column, so_far in zip(_bytes(sizes, words), _columns(sizes, where), total, strict=True):
        scale = of_groups(held.scale, column, jnp.bfloat16 if exact else jnp.float32)
        parts = packed_numbers.numbers(bits, sizes.how.numbers, sizes.compiled)
        if held.zero is not None and sizes.how.whole:
            zero = of_groups(held.zero, column, jnp.bfloat16)
            parts = [packed_numbers.minus(one, zero, sizes.compiled) for one in parts]  # exact, up to 256
        if exact:
            parts = [packed_numbers.times(one, scale, sizes.compiled) for one in parts]
        elif sizes.how.whole:
            parts = [one.astype(jnp.float32) * scale for one in parts]
        else:
            zero = of_groups(held.zero, column, jnp.float32)
            parts = [(one.astype(jnp.float32) - zero) * scale for one in parts]
        sums = [_product(sizes, tile, factor, parts) for tile, factor in enumerate(factors)]
        found.append(tuple(map(jnp.add, so_far, sums)))
    return tuple(found)


def _held_words(held: Grouped, where: Where, byte: jax.Array, here: jax.Array | None) -> jax.Array:
    """The elements of these rows of bytes."""
    word, inside = where.word
    mask = _both(here if here is None else here[:, None], inside if inside is None else inside[None])
    return _load(held.values.at[*where.expert, byte[:, None], word[None]], mask)


def _bytes(sizes: Sizes, words: jax.Array) -> list[jax.Array]:
    return packed_numbers.bytes_of(words, sizes.compiled)


def _factor(x, row: tuple[jax.Array, jax.Array | None], at: jax.Array, here: jax.Array | None) -> jax.Array:
    """[TILE, numbers] of x, zero where there is nothing to multiply."""
    row, row_here = row
    return _load(x.at[row[:, None], at[None]], _both(row_here, here if here is None else here[None]), 0)


def _product(sizes: Sizes, tile: int, factor: list[jax.Array], parts: list[jax.Array]) -> jax.Array:
    """Of the rows of one tile. To each tile its numbers are others: of the same ones Triton, from jax 0.11 on, makes a
    second set for all tiles but the first, and moves it through shared memory (of 64 rows and int4 552 instructions and
    8 barriers in a step for 464 and 2; with zeros 312 bytes of registers spilled for none)."""
    own = parts if tile == 0 else [packed_numbers.apart(one, tile, sizes.compiled) for one in parts]
    return sum(map(_dot, factor, own))


def _dot(factor: jax.Array, numbers: jax.Array) -> jax.Array:
    return triton.dot(factor, numbers.astype(factor.dtype), precision=jax.lax.Precision.HIGHEST)


def _load(ref, mask: jax.Array | None = None, other: int | None = None) -> jax.Array:
    """What is beyond the mask is `other`, or may be any number, as what meets zeros of x, or is not stored."""
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=other)


def _both(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    """Where both are; None is everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b
