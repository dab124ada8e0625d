"""Attention over pages on NVIDIA GPUs: a Pallas kernel, by way of Triton, that reads pages where they lie.

A program takes a block of query rows of one sequence and kv head (the heads of a group and a chunk's tokens together)
and goes over its keys with a running softmax (https://arxiv.org/abs/2205.14135). Where a sequence alone has too few
such programs for a GPU, its keys are split and the parts merged by a second kernel (https://arxiv.org/abs/2311.01282).
How they are split follows from the row and the sizes of the program, and not from other rows, so that a row's bits do
not depend on what else is in the batch.
"""

import functools
import math
import operator
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops import packed_numbers
from shardlm.ops.attention import MASKED
from shardlm.ops.kv_format import SCALE, numbers_each
from shardlm.ops.paged_sizes import Piece, Sizes, sizes_of, turns_of

FEW_TOKENS = 8  # of a row: a decode step, or one that verifies guesses
LOG2E = math.log2(math.e)


class Rule(NamedTuple):
    """Of scores; as in `paged_attention.reference`."""

    scale: float
    window: int
    softcap: float
    chunk: int


def pallas(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    page_table: jax.Array,
    positions: jax.Array,
    first_page: jax.Array,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    value_dim: int = 0,
    head: jax.Array | None = None,
    chunk: int = 0,
    until: jax.Array | None = None,
    alone: bool | None = None,
    with_lse: bool = False,
    interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """As `paged_attention.blocked`; the arrays of one device. `alone`: a row's keys are split as if there were no other
    row; None: where it has few tokens. `interpret` runs it anywhere, slowly."""
    values_inside = v_pool is None
    one = q.shape[1] == 1 and until is None  # of which it is known how far it sees, as no other is in its block
    sizes = sizes_of(
        q.shape,
        q.dtype,
        k_pool,
        1 if head is not None else k_pool.shape[2],
        value_dim if values_inside else v_pool.shape[3] * numbers_each(v_pool),
        values_inside,
        page_table.shape[1],
        q.shape[1] <= FEW_TOKENS if alone is None else alone,
        not interpret,
        (chunk or window) if one else 0,
    )
    inputs = {
        "q": q,
        "k": k_pool,
        "v": v_pool,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "table": page_table,
        "positions": positions,
        "until": until,
        "turns": turns_of(positions, sizes, window, chunk, until),
        "where": jnp.stack([first_page, head if head is not None else jnp.int32(0)]),
        "sinks": sinks,
    }
    inputs = {name: a for name, a in inputs.items() if a is not None}
    found = _attended(inputs, sizes, Rule(scale, window, softcap, chunk), with_lse, interpret)
    return tuple(found) if with_lse else found[0]


def _attended(inputs: dict[str, jax.Array], sizes: Sizes, rule: Rule, with_lse: bool, interpret: bool):
    """[out], and with it the log-partition where it is asked for."""
    q = inputs["q"]
    B, T, N, _ = q.shape
    wholes = [jax.ShapeDtypeStruct((B, T, N, sizes.value_dim), q.dtype)]
    wholes += [jax.ShapeDtypeStruct((B, T, N), jnp.float32)] if with_lse else []
    grid = (sizes.kv_heads * sizes.row_blocks, B, sizes.splits)
    options = triton.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages)
    run = functools.partial(pl.pallas_call, interpret=interpret)
    kernel = functools.partial(_kernel, sizes, rule, len(wholes))
    if sizes.splits == 1:
        return run(kernel, wholes, grid=grid, compiler_params=options, name="paged_attention")(inputs)
    part = jax.ShapeDtypeStruct((B, sizes.splits, T, N, sizes.value_dim), jnp.float32)
    number = jax.ShapeDtypeStruct((B, sizes.splits, T, N), jnp.float32)
    outs = [*wholes, part, number, number]
    found = run(kernel, outs, grid=grid, compiler_params=options, name="paged_attention")(inputs)
    merge = functools.partial(_merge, sizes, len(wholes))
    # A thread holds 32 numbers of 16 parts, and 64 of 128: by two warps these are more than it has registers for.
    warps = max(2, min(8, pl.next_power_of_2(sizes.splits) // 8))
    grid, options = (T * N, pl.cdiv(sizes.value_dim, 128), B), triton.CompilerParams(num_warps=warps)
    same = {place: place for place in range(len(wholes))}
    run = functools.partial(run, input_output_aliases=same, compiler_params=options, name="paged_attention_merge")
    return run(merge, wholes, grid=grid)(*found[: len(wholes)], inputs["turns"], *found[len(wholes) :])


def _share(turns, b, row_block, sizes: Sizes):
    """(first block, the one after the last, last position, blocks of one part) of a block of rows."""
    first, stop, last = (turns[b, row_block, i] for i in range(3))
    return first, stop, last, jnp.maximum(pl.cdiv(stop - first, sizes.splits), sizes.least)


def _kernel(sizes: Sizes, rule: Rule, count: int, refs, *outs):
    """One block of rows against one part of its keys, if there is that part; where it is all of them, that is the first
    `count` outputs, and else the others."""
    wholes, of_parts = outs[:count], outs[count:]
    block, b, split = (pl.program_id(axis) for axis in range(3))
    row_block = jax.lax.rem(block, sizes.row_blocks)
    first, stop, last, share = _share(refs["turns"], b, row_block, sizes)
    begin = first + split * share

    def run():
        end = jnp.minimum(begin + share, stop)
        made, where = _attend(sizes, rule, refs, (block, split, b), (begin, end, last))
        if not of_parts:
            _store_whole(sizes, made, where, *wholes)
            return
        alone = stop - first <= share
        pl.when(alone)(lambda: _store_whole(sizes, made, where, *wholes))
        pl.when(~alone)(lambda: _store_part(sizes, made, where, split, *of_parts))

    # Programs of parts that are not there come last in the grid: 64 rows of 640 positions took 49.6 us where 15 of 16
    # lay between those that are, and 42 in one part each without any (H200, measured; in this order not measured).
    pl.when((split == 0) | (begin < stop))(run) if of_parts else run()


def _store_whole(sizes: Sizes, made, where, out, lse=None) -> None:
    (peak, total, sums), (b, t, n, real) = made, where
    _store(out, (b, t, n), [one / total[:, None] for one in sums], real, sizes)
    if lse is not None:
        triton.store(lse.at[b, t, n], peak / LOG2E + jnp.log(total), mask=real)


def _store_part(sizes: Sizes, made, where, split, out, peaks, totals) -> None:
    (*numbers, sums), (b, t, n, real) = made, where
    for ref, number in zip((peaks, totals), numbers, strict=True):
        triton.store(ref.at[b, split, t, n], number, mask=real)
    _store(out, (b, split, t, n), sums, real, sizes)


def _attend(sizes: Sizes, rule: Rule, refs, program, turns):
    """((peak and total [block_rows], sums [block_rows, size] of each piece of the values' numbers) of a block of rows
    over the keys of these turns, (sequence, tokens, heads, which rows there are))."""
    (block, split, b), (begin, stop, last) = program, turns
    kv, row_block = jax.lax.div(block, sizes.row_blocks), jax.lax.rem(block, sizes.row_blocks)
    row = row_block * sizes.block_rows + jnp.arange(sizes.block_rows)
    real = row < sizes.rows
    t, n = jax.lax.div(row, sizes.group), kv * sizes.group + jax.lax.rem(row, sizes.group)
    q = [_query(refs["q"], piece, (b, t, n), real, sizes.pack) for piece in sizes.spread(sizes.key_columns)]
    if sizes.tokens == 1 and not sizes.branches:
        position = jnp.broadcast_to(last, (1,))  # of all rows, so that a key is compared once
    else:
        position = triton.load(refs["positions"].at[b, t], mask=real, other=0)
    until = triton.load(refs["until"].at[b, t], mask=real, other=0) if "until" in refs else position
    head = kv + refs["where"][1]
    clear, stop_clear = refs["turns"][b, row_block, 3], refs["turns"][b, row_block, 4]

    def turn(i, carry):
        peak, total, sums = carry
        index = i * sizes.block_keys + jnp.arange(sizes.block_keys)
        here = index <= last
        number, offset = _over(index, sizes.page_size)
        page = triton.load(refs["table"].at[b, number], mask=here, other=0)
        at = (page + refs["where"][0], offset, head)
        keys, of_keys = tiles(refs, "k", at, here, sizes.key_columns, q[0].dtype, sizes.compiled)
        products = [dot(one, key.T) for one, key in zip(q, keys, strict=True)]
        whole = (i >= clear) & (i < stop_clear) if sizes.branches else None
        scores, to_log2 = _scores(products, of_keys, whole, (position, until), index, rule)
        new = jnp.maximum(peak, scores.max(axis=1) * to_log2)
        weights = exp2(scores, to_log2, -new[:, None], sizes.compiled)
        keep = exp2(peak, 1.0, -new, sizes.compiled)
        total = total * keep + weights.sum(axis=1)
        values, of_values = keys[: len(sums)], of_keys
        if "v" in refs:
            values, of_values = tiles(refs, "v", at, here, sizes.value_columns, q[0].dtype, sizes.compiled)
        weights = (weights * of_values).astype(q[0].dtype)
        return new, total, tuple(s * keep[:, None] + dot(weights, v) for s, v in zip(sums, values, strict=True))

    peak = jnp.full((sizes.block_rows,), MASKED, jnp.float32)
    total = jnp.zeros((sizes.block_rows,), jnp.float32)
    if "sinks" in refs:
        sink = refs["sinks"][n].astype(jnp.float32)
        peak, total = jnp.where(split == 0, sink * LOG2E, peak), jnp.where(split == 0, 1.0, total)
    sums = [jnp.zeros((sizes.block_rows, size), jnp.float32) for _, size, _ in sizes.spread(sizes.value_columns)]
    return jax.lax.fori_loop(begin, stop, turn, (peak, total, tuple(sums))), (b, t, n, real)


def _scores(products, of_keys, whole, places, index, rule: Rule):
    """(scores [block_rows, block_keys], -inf of what a query does not see, and by what they are to be multiplied to be
    exponents of two). `places`: of queries, and the last that each sees. Where all rows see the `whole` block nothing
    is compared; None: always.

    That this is a branch matters beyond what it saves: Triton gives a product whose numbers reach another product to
    warps by rows alone, so that 8 warps with 64 rows all make each of them twice on Hopper; it does not look through
    branches, and divides the keys."""

    def summed(*products):
        scores = functools.reduce(operator.add, products) * of_keys
        return jnp.tanh(scores * (rule.scale / rule.softcap)) if rule.softcap else scores

    position, until = places

    def masked(*products):
        distance = position[:, None] - index[None]
        mask = distance >= 0 if until is position else until[:, None] >= index[None]
        if rule.window:
            mask &= distance < rule.window
        if rule.chunk:
            mask &= distance <= jax.lax.rem(position, rule.chunk)[:, None]
        return jnp.where(mask, summed(*products), -jnp.inf)

    scores = masked(*products) if whole is None else jax.lax.cond(whole, summed, masked, *products)
    return scores, (rule.softcap or rule.scale) * LOG2E


def exp2(x: jax.Array, factor: float, plus: jax.Array, compiled: bool) -> jax.Array:
    """2 ** (x * factor + plus) of float32. On a GPU the two are one instruction each, and what is below 2**-126 is 0:
    to make such numbers would take three more."""
    if not compiled:
        return jnp.exp2(x * factor + plus)
    [bits] = struct.unpack("<I", struct.pack("<f", factor))
    [made] = triton.elementwise_inline_asm(
        f"{{ .reg .f32 %a; fma.rn.f32 %a, $1, 0f{bits:08x}, $2; ex2.approx.ftz.f32 $0, %a; }}",
        args=[x, jnp.broadcast_to(plus, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return made


def _over(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """What of index >= 0 is divided by `size`, and what remains."""
    if size & (size - 1):
        return jax.lax.div(index, size), jax.lax.rem(index, size)
    return index >> (size.bit_length() - 1), index & (size - 1)


def _query(ref, piece: Piece, row, real, pack: int) -> jax.Array:
    """[block_rows, size] of the queries' numbers that meet one tile of keys."""
    first, size, width = piece
    column = jnp.arange(size)
    mask = real[:, None] & (column < width)[None]
    b, t, n = row
    return triton.load(ref.at[b, t[:, None], n[:, None], (first + pack * column)[None]], mask=mask, other=0)


def tiles(refs, name: str, at, here, pieces, dtype, compiled: bool):
    """(the numbers of these positions, [block_keys, size] for each piece and each of the numbers in an element, their
    scale [1, block_keys] or 1)."""
    page, offset, head = at
    ref, scale, found = refs[name], 1.0, []
    if name + SCALE in refs:
        scale = triton.load(refs[name + SCALE].at[*at, 0], mask=here, other=0)[None]
    for first, size, width in pieces:
        column = jnp.arange(size)
        mask = here[:, None] & (column < width)[None]
        tile = triton.load(ref.at[page[:, None], offset[:, None], head, (first + column)[None]], mask=mask, other=0)
        if tile.dtype != jnp.int16:
            found.append(tile.astype(dtype))
            continue
        how = "int8" if name + SCALE in refs else "fp8"
        for bits in packed_numbers.bytes_of(tile, compiled, how):
            [numbers] = packed_numbers.numbers(bits, how, compiled)
            found.append(numbers.astype(dtype))
    return found, scale


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums, and products of float32, in float32."""
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST)


def _store(out, where, sums, real, sizes: Sizes) -> None:
    """Writes the rows [block_rows, size] of each piece of the values' numbers."""
    *first, t, n = where
    for (start, size, width), one in zip(sizes.spread(sizes.value_columns), sums, strict=True):
        column = jnp.arange(size)
        mask = real[:, None] & (column < width)[None]
        at = out.at[*first, t[:, None], n[:, None], (start + sizes.pack * column)[None]]
        triton.store(at, one.astype(out.dtype), mask=mask)


def _merge(sizes: Sizes, count: int, *refs):
    """One head of one token, 128 numbers of it: the parts of its keys, where it has several; else it is there, in the
    first `count` of what is given and returned."""
    turns, parts, peaks, totals, out, *lse = refs[count:]
    row, piece, b = (pl.program_id(i) for i in range(3))
    t, n = jax.lax.div(row, sizes.heads), jax.lax.rem(row, sizes.heads)
    of_block = t * sizes.group + jax.lax.rem(n, sizes.group)
    first, stop, _, share = _share(turns, b, jax.lax.div(of_block, sizes.block_rows), sizes)

    @pl.when(stop - first > share)
    def _():
        split = jnp.arange(pl.next_power_of_2(sizes.splits))
        there = split * share < stop - first
        split = jnp.where(there, split, 0)
        peak = triton.load(peaks.at[b, split, t, n], mask=there, other=MASKED)
        total = triton.load(totals.at[b, split, t, n], mask=there, other=0)
        largest = peak.max()
        keep = jnp.where(there, jnp.exp2(peak - largest), 0)
        column = piece * 128 + jnp.arange(128)
        inside = column < sizes.value_dim
        mask = there[:, None] & inside[None]
        part = triton.load(parts.at[b, split[:, None], t, n, column[None]], mask=mask, other=0)
        result = (part * keep[:, None]).sum(axis=0) / (total * keep).sum()
        triton.store(out.at[b, t, n, column], result.astype(out.dtype), mask=inside)
        if lse:  # each piece of the values' numbers finds the same
            partition = largest / LOG2E + jnp.log((total * keep).sum())
            triton.store(lse[0].at[b, t, n], partition)
