"""Attention over pages on NVIDIA GPUs: a Pallas kernel, by way of Triton, that reads pages where they lie.

A program takes a block of query rows of one sequence and kv head (the heads of a group and a chunk's tokens together)
and goes over its keys with a running softmax (https://arxiv.org/abs/2205.14135). Where a sequence alone has too few
such programs for a GPU, its keys are split and the parts merged by a second kernel (https://arxiv.org/abs/2311.01282).
How they are split follows from the row and the sizes of the program, and of a decode step not from the number of rows,
so that a row's bits do not depend on the batch.
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
from shardlm.ops.attention import MASKED
from shardlm.ops.kv_format import SCALE, numbers_each

PROGRAMS = 128  # that a sequence is split into, about a GPU's multiprocessors
PART_BYTES = 2**20  # of the parts of one sequence, which are written and read again
SPLIT_KEYS = 256  # the least that are worth a part
FEW_TOKENS = 8  # of a row: a decode step, or one that verifies guesses
LOG2E = math.log2(math.e)


class Rule(NamedTuple):
    """Of scores; as in `paged_attention.reference`."""

    scale: float
    window: int
    softcap: float
    chunk: int


Piece = tuple[int, int, int]  # of a head's elements: the first, how many, and how many of these are real


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when compiling.

    tokens, heads, kv_heads  of the queries, and of the pools that they share
    pack          numbers in an element of the pools (kv_format.py)
    key_columns   the pieces that a key's elements are read in
    value_columns the same of a value; of values inside keys, they are the first of key_columns
    block_rows, block_keys  of one program and of one turn of its loop
    splits        of the keys of a sequence
    compiled      for a GPU, or else interpreted
    """

    tokens: int
    heads: int
    kv_heads: int
    page_size: int
    pack: int
    key_columns: tuple[Piece, ...]
    value_columns: tuple[Piece, ...]
    value_dim: int
    block_rows: int
    block_keys: int
    splits: int
    compiled: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Of a sequence and kv head."""
        return self.tokens * self.group

    @property
    def row_blocks(self) -> int:
        return pl.cdiv(self.rows, self.block_rows)

    @property
    def least(self) -> int:
        """Turns that are worth a part."""
        return SPLIT_KEYS // self.block_keys

    def spread(self, pieces: tuple[Piece, ...]) -> list[Piece]:
        """The numbers that `tiles` finds in each piece, by the first: every `pack`-th one."""
        return [(self.pack * first + i, size, real) for first, size, real in pieces for i in range(self.pack)]


def pieces(width: int, first: int = 0) -> tuple[Piece, ...]:
    """Powers of two of at least 16, as Triton wants its matmuls; the last may be padded."""
    found = []
    while width > 0:
        size = max(16, 1 << (width.bit_length() - 1))
        found.append((first, size, min(size, width)))
        first, width = first + size, width - size
    return tuple(found)


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
    alone: bool | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `paged_attention.blocked`; the arrays of one device. `alone`: a row's keys are split as if there were no other
    row; None: where it has few tokens. `interpret` runs it anywhere, slowly."""
    values_inside = v_pool is None
    sizes = _sizes(
        q.shape,
        q.dtype,
        k_pool,
        1 if head is not None else k_pool.shape[2],
        value_dim if values_inside else v_pool.shape[3] * numbers_each(v_pool),
        values_inside,
        page_table.shape[1],
        q.shape[1] <= FEW_TOKENS if alone is None else alone,
        not interpret,
    )
    inputs = {
        "q": q,
        "k": k_pool,
        "v": v_pool,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "table": page_table,
        "positions": positions,
        "turns": _turns(positions, sizes, window, chunk),
        "where": jnp.stack([first_page, head if head is not None else jnp.int32(0)]),
        "sinks": sinks,
    }
    inputs = {name: a for name, a in inputs.items() if a is not None}
    return _attended(inputs, sizes, Rule(scale, window, softcap, chunk), interpret)


def _sizes(
    shape, dtype, k_pool, kv_heads: int, value_dim: int, values_inside: bool, row_pages: int, alone: bool, compiled=True
) -> Sizes:
    """For queries of this shape and dtype."""
    B, T, N, key_dim = shape
    pack = numbers_each(k_pool)
    wide = max(key_dim, value_dim) > 256
    block = (32 if wide else 64) * 2 // dtype.itemsize  # more of float32 does not fit in registers
    rows = T * N // kv_heads
    # Of latents, of which 64 rows share what 32 read twice. Bytes have no registers left for it.
    twice = wide and values_inside and pack == 1 and dtype.itemsize == 2
    block_rows = min(2 * block if twice else block, max(16, pl.next_power_of_2(rows)))
    of_value = pieces(value_dim // pack)
    beyond = pieces((key_dim - value_dim) // pack, value_dim // pack)
    programs = kv_heads * pl.cdiv(rows, block_rows) * (1 if alone else B)
    most = min(PART_BYTES // (4 * T * N * value_dim), row_pages * k_pool.shape[1] // SPLIT_KEYS)
    return Sizes(
        tokens=T,
        heads=N,
        kv_heads=kv_heads,
        page_size=k_pool.shape[1],
        pack=pack,
        key_columns=of_value + beyond if values_inside else pieces(key_dim // pack),
        value_columns=of_value,
        value_dim=value_dim,
        block_rows=block_rows,
        block_keys=block,
        splits=max(1, min(pl.cdiv(PROGRAMS, programs), most)),
        compiled=compiled,
    )


def _turns(positions: jax.Array, sizes: Sizes, window: int, chunk: int = 0) -> jax.Array:
    """int32 [B, row_blocks, 3]: the first block of keys that a block of rows sees, the one after its last, and its last
    position."""
    token = jnp.minimum(jnp.arange(sizes.row_blocks * sizes.block_rows) // sizes.group, sizes.tokens - 1)
    each = positions[:, token].reshape(-1, sizes.row_blocks, sizes.block_rows)
    first, last = each.min(axis=2), each.max(axis=2)
    if chunk:
        first = first // chunk * chunk
    else:
        first = jnp.maximum(first - window + 1, 0) if window else jnp.zeros_like(first)
    return jnp.stack([first // sizes.block_keys, last // sizes.block_keys + 1, last], axis=2)


def _attended(inputs: dict[str, jax.Array], sizes: Sizes, rule: Rule, interpret: bool) -> jax.Array:
    q = inputs["q"]
    B, T, N, _ = q.shape
    out = jax.ShapeDtypeStruct((B, T, N, sizes.value_dim), q.dtype)
    grid = (sizes.kv_heads * sizes.row_blocks, sizes.splits, B)
    options = triton.CompilerParams(
        num_warps=8 if sizes.block_rows * sizes.value_dim > 8192 else 4, num_stages=3 if q.dtype.itemsize == 2 else 2
    )
    run = functools.partial(pl.pallas_call, interpret=interpret)
    if sizes.splits == 1:
        kernel = functools.partial(_kernel, sizes, rule)
        return run(kernel, out, grid=grid, compiler_params=options, name="paged_attention")(inputs)
    part = jax.ShapeDtypeStruct((B, sizes.splits, T, N, sizes.value_dim), jnp.float32)
    number = jax.ShapeDtypeStruct((B, sizes.splits, T, N), jnp.float32)
    kernel = functools.partial(_kernel, sizes, rule)
    parts = run(kernel, (part, number, number), grid=grid, compiler_params=options, name="paged_attention")(inputs)
    merge = functools.partial(_merge, sizes)
    grid = (T * N, pl.cdiv(sizes.value_dim, 128), B)
    options = triton.CompilerParams(num_warps=4)
    return run(merge, out, grid=grid, compiler_params=options, name="paged_attention_merge")(inputs["turns"], *parts)


def _share(turns, b, row_block, sizes: Sizes):
    """(first block, the one after the last, last position, blocks of one part) of a block of rows."""
    first, stop, last = (turns[b, row_block, i] for i in range(3))
    return first, stop, last, jnp.maximum(pl.cdiv(stop - first, sizes.splits), sizes.least)


def _kernel(sizes: Sizes, rule: Rule, refs, out, peaks=None, totals=None):
    """One block of rows against one part of its keys. Without `peaks` and `totals`, it is all of them."""
    block, split, b = (pl.program_id(axis) for axis in range(3))
    kv, row_block = jax.lax.div(block, sizes.row_blocks), jax.lax.rem(block, sizes.row_blocks)
    row = row_block * sizes.block_rows + jnp.arange(sizes.block_rows)
    real = row < sizes.rows
    t, n = jax.lax.div(row, sizes.group), kv * sizes.group + jax.lax.rem(row, sizes.group)
    first, stop, last, share = _share(refs["turns"], b, row_block, sizes)
    begin = first + split * share
    q = [_query(refs["q"], piece, (b, t, n), real, sizes.pack) for piece in sizes.spread(sizes.key_columns)]
    position = triton.load(refs["positions"].at[b, t], mask=real, other=0)
    head = kv + refs["where"][1]

    def turn(i, carry):
        peak, total, sums = carry
        index = i * sizes.block_keys + jnp.arange(sizes.block_keys)
        here = index <= last
        page = triton.load(refs["table"].at[b, jax.lax.div(index, sizes.page_size)], mask=here, other=0)
        at = (page + refs["where"][0], jax.lax.rem(index, sizes.page_size), head)
        keys, of_keys = tiles(refs, "k", at, here, sizes.key_columns, q[0].dtype, sizes.compiled)
        scores = sum(dot(one, key.T) for one, key in zip(q, keys, strict=True)) * (rule.scale * of_keys)
        if rule.softcap:
            scores = rule.softcap * jnp.tanh(scores / rule.softcap)
        distance = position[:, None] - index[None]
        mask = (distance >= 0) & (distance < rule.window) if rule.window else distance >= 0
        if rule.chunk:
            mask &= distance <= jax.lax.rem(position, rule.chunk)[:, None]
        new = jnp.maximum(peak, jnp.where(mask, scores, MASKED).max(axis=1))
        weights = jnp.where(mask, jnp.exp2((scores - new[:, None]) * LOG2E), 0)
        keep = jnp.exp2((peak - new) * LOG2E)
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
        peak, total = jnp.where(split == 0, sink, peak), jnp.where(split == 0, 1.0, total)
    sums = [jnp.zeros((sizes.block_rows, size), jnp.float32) for _, size, _ in sizes.spread(sizes.value_columns)]
    peak, total, sums = jax.lax.fori_loop(begin, jnp.minimum(begin + share, stop), turn, (peak, total, tuple(sums)))
    if peaks is None:
        where = (b, t, n)
        sums = [one / total[:, None] for one in sums]
    else:
        where, real = (b, split, t, n), real & (begin < stop)
        triton.store(peaks.at[*where], peak, mask=real)
        triton.store(totals.at[*where], total, mask=real)
    _store(out, where, sums, real, sizes)


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
        for bits in packed_numbers.bytes_of(tile, compiled):
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


def _merge(sizes: Sizes, turns, parts, peaks, totals, out):
    """One head of one token: the parts of its keys that have any, 128 numbers of them."""
    row, piece, b = (pl.program_id(i) for i in range(3))
    t, n = jax.lax.div(row, sizes.heads), jax.lax.rem(row, sizes.heads)
    of_block = t * sizes.group + jax.lax.rem(n, sizes.group)
    first, stop, _, share = _share(turns, b, jax.lax.div(of_block, sizes.block_rows), sizes)
    split = jnp.arange(pl.next_power_of_2(sizes.splits))
    there = split * share < stop - first
    split = jnp.where(there, split, 0)
    peak = triton.load(peaks.at[b, split, t, n], mask=there, other=MASKED)
    total = triton.load(totals.at[b, split, t, n], mask=there, other=0)
    keep = jnp.where(there, jnp.exp2((peak - peak.max()) * LOG2E), 0)
    column = piece * 128 + jnp.arange(128)
    inside = column < sizes.value_dim
    mask = there[:, None] & inside[None]
    part = triton.load(parts.at[b, split[:, None], t, n, column[None]], mask=mask, other=0)
    result = (part * keep[:, None]).sum(axis=0) / (total * keep).sum()
    triton.store(out.at[b, t, n, column], result.astype(out.dtype), mask=inside)
