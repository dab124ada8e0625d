"""An indexer's scores over pages and the choice of the highest (token_choice.py) on NVIDIA GPUs: two Pallas kernels, by
way of Triton. The first reads keys where they lie: a program scores a block of a row's keys for a few of its tokens, so
that the keys are read once for these; heads' scores are summed where they are made and never written. The second finds
a query's threshold and lists the places of what is above it, all in one program, which goes over the scores up to the
query's position once for each two bits of the threshold: as operations of XLA's that was 28 kernels a layer, of all
positions there is room for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.kv_format import numbers_each
from shardlm.ops.paged_kernel import dot, tiles
from shardlm.ops.paged_sizes import Piece, pieces

BLOCK_KEYS, TOKENS = 64, 8  # of one program that scores
BLOCK_SCORES = 2048  # that one which chooses has at a time
LOWEST = np.int32(-(2**31))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when compiling: queries' heads, padded to what Triton multiplies, and their tokens of a program;
    `pack` numbers in an element of the pool, which is read in `columns`; `compiled`: for a GPU, or else interpreted."""

    heads: int
    padded_heads: int
    tokens: int
    page_size: int
    pack: int
    columns: tuple[Piece, ...]
    positions: int
    compiled: bool


def scored(
    q: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    *,
    pool: jax.Array,
    scale: jax.Array | None,
    page_table: jax.Array,
    first_page: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """float32 [B, T, S], what is beyond a token's position undefined. q [B, T, N, H], weights float32 [B, T, N],
    positions int32 [B, T], pool [pages, page_size, 1, H] (kv_format.py), page_table int32 [B, W]; the arrays of one
    device. `interpret` runs it anywhere, slowly."""
    B, T, N, H = q.shape
    pack, page_size = numbers_each(pool), pool.shape[1]
    S = page_table.shape[1] * page_size
    sizes = Sizes(
        N, max(16, pl.next_power_of_2(N)), min(T, TOKENS), page_size, pack, pieces(H // pack), S, not interpret
    )
    inputs = {"q": q, "weights": weights, "positions": positions, "table": page_table}
    inputs |= {"k": pool, "where": first_page[None]} | ({} if scale is None else {"k_scale": scale})
    run = pl.pallas_call(
        functools.partial(_score, sizes),
        jax.ShapeDtypeStruct((B, T, S), jnp.float32),
        grid=(pl.cdiv(S, BLOCK_KEYS), pl.cdiv(T, sizes.tokens), B),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="index_scores",
    )
    return run(inputs)


def _score(sizes: Sizes, refs, out):
    """One block of keys against the heads of a few tokens, one token after the other."""
    block, of_tokens, b = (pl.program_id(axis) for axis in range(3))
    index = block * BLOCK_KEYS + jnp.arange(BLOCK_KEYS)
    first, T = of_tokens * sizes.tokens, refs["q"].shape[1]
    token = first + jnp.arange(pl.next_power_of_2(sizes.tokens))
    position = triton.load(refs["positions"].at[b, token], mask=(token < T) & (token < first + sizes.tokens), other=0)
    here = (index <= position.max()) & (index < sizes.positions)
    page = triton.load(refs["table"].at[b, jax.lax.div(index, sizes.page_size)], mask=here, other=0)
    at = (page + refs["where"][0], jax.lax.rem(index, sizes.page_size), 0)
    dtype = refs["q"].dtype
    keys, of_keys = tiles(refs, "k", at, here, sizes.columns, dtype, sizes.compiled)
    pieces = [(sizes.pack * start + i, size, real) for start, size, real in sizes.columns for i in range(sizes.pack)]
    head = jnp.arange(sizes.padded_heads)
    real_head = head < sizes.heads

    def one(i, _):
        t = first + i
        there = real_head & (t < T)
        found = jnp.zeros((sizes.padded_heads, BLOCK_KEYS), jnp.float32)
        for (start, size, width), key in zip(pieces, keys, strict=True):
            column = jnp.arange(size)
            mask = there[:, None] & (column < width)[None]
            where = refs["q"].at[b, t, head[:, None], (start + sizes.pack * column)[None]]
            found += dot(triton.load(where, mask=mask, other=0), key.T)
        weight = triton.load(refs["weights"].at[b, t, head], mask=there, other=0)
        score = jnp.sum(jnp.maximum(found * of_keys, 0) * weight[:, None], axis=0)
        triton.store(out.at[b, t, index], score, mask=(index < sizes.positions) & (t < T))
        return ()

    @pl.when(block * BLOCK_KEYS <= position.max())
    def _():
        jax.lax.fori_loop(0, sizes.tokens, one, ())


def chosen(
    scores: jax.Array,
    positions: jax.Array,
    page_table: jax.Array,
    count: int,
    page_size: int,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """The `count` highest up to each query's position, of equal ones the first, as paged_choice.py holds a choice:
    scores float32 [B, T, S], positions int32 [B, T], page_table int32 [B, W]."""
    B, T, S = scores.shape
    spare = 1 if interpret else 0  # interpreted, what a mask leaves out is written back, and needs a place of its own
    slots, number = (jax.ShapeDtypeStruct((B, T, *of), jnp.int32) for of in ((count + spare,), ()))
    run = pl.pallas_call(
        functools.partial(_choose, count, page_size, min(BLOCK_SCORES, pl.next_power_of_2(S))),
        (slots, number),
        grid=(T, B),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="choose_tokens",
    )
    slots, number = run(scores, positions, page_table)
    return {"slots": slots[:, :, :count], "number": number}


def _choose(count: int, page_size: int, width: int, scores, positions, table, slots, number):
    t, b = pl.program_id(0), pl.program_id(1)
    there = positions[b, t] + 1  # tokens to choose from
    blocks = pl.cdiv(there, width)
    aligned = 16 if scores.shape[2] % 16 == 0 else 1
    read = pl.cdiv(there, aligned) * aligned  # a mask that begins anywhere would have them read one by one

    def block(i):
        """(which tokens, whether they are there, their scores as int32 of the same order)."""
        token = i * width + jnp.arange(width)
        real = token < there
        score = triton.load(scores.at[b, t, token], mask=token < read, other=0)
        bits = jax.lax.bitcast_convert_type(jnp.where(score == 0, 0.0, score), jnp.int32)
        return token, real, bits ^ ((bits >> 31) & 0x7FFFFFFF)

    def reached(found, step):
        """As many tokens as there are at and above each of three thresholds."""

        def more(i, carry):
            _, real, key = block(i)
            return tuple(
                n + jnp.sum((real & (key >= found + times * step)).astype(jnp.int32))
                for times, n in zip((1, 2, 3), carry, strict=True)
            )

        return jax.lax.fori_loop(0, blocks, more, (jnp.int32(0),) * 3)

    def two_bits(i, found):
        step = jnp.int32(1) << (30 - 2 * i)
        return found + sum((n >= count).astype(jnp.int32) for n in reached(found, step)) * step

    # All where there are no more: the threshold is then below all.
    passes = 16 * (there > count).astype(jnp.int32)
    threshold = jax.lax.fori_loop(0, passes, two_bits, jnp.int32(LOWEST))

    def above(i, n):
        _, real, key = block(i)
        return n + jnp.sum((real & (key > threshold)).astype(jnp.int32))

    room = count - jax.lax.fori_loop(0, blocks, above, jnp.int32(0))

    def write(i, carry):
        listed, equals = carry
        token, real, key = block(i)
        equal = (real & (key == threshold)).astype(jnp.int32)
        nth = equals + jnp.cumsum(equal)
        taken = real & ((key > threshold) | ((equal > 0) & (nth <= room)))
        rank = jnp.where(taken, listed + jnp.cumsum(taken.astype(jnp.int32)) - 1, count)
        page = triton.load(table.at[b, jax.lax.div(token, page_size)], mask=taken, other=0)
        triton.store(slots.at[b, t, rank], page * page_size + jax.lax.rem(token, page_size), mask=taken)
        return listed + jnp.sum(taken.astype(jnp.int32)), equals + jnp.sum(equal)

    listed, _ = jax.lax.fori_loop(0, blocks, write, (jnp.int32(0), jnp.int32(0)))
    number[b, t] = listed
