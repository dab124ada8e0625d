"""Scores of an indexer over pages (token_choice.py, `scores`) on NVIDIA GPUs: a Pallas kernel, by way of Triton, that
reads keys where they lie. A program scores a block of a row's keys for a few of its tokens, so that the keys are read
once for these; heads' scores are summed where they are made and never written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.kv_format import numbers_each
from shardlm.ops.paged_kernel import Piece, _dot, _tiles, pieces

BLOCK_KEYS, TOKENS = 64, 8  # of one program


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is known when compiling: queries' heads, padded to what Triton multiplies, and their tokens of a program;
    `pack` numbers in an element of the pool, which is read in `columns`."""

    heads: int
    padded_heads: int
    tokens: int
    page_size: int
    pack: int
    columns: tuple[Piece, ...]
    positions: int


def pallas(
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
    sizes = Sizes(N, max(16, pl.next_power_of_2(N)), min(T, TOKENS), page_size, pack, pieces(H // pack), S)
    inputs = {"q": q, "weights": weights, "positions": positions, "table": page_table}
    inputs |= {"k": pool, "where": first_page[None]} | ({} if scale is None else {"k_scale": scale})
    run = pl.pallas_call(
        functools.partial(_kernel, sizes),
        jax.ShapeDtypeStruct((B, T, S), jnp.float32),
        grid=(pl.cdiv(S, BLOCK_KEYS), pl.cdiv(T, sizes.tokens), B),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="index_scores",
    )
    return run(inputs)


def _kernel(sizes: Sizes, refs, out):
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
    keys, of_keys = _tiles(refs, "k", at, here, sizes.columns, dtype)
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
            found += _dot(triton.load(where, mask=mask, other=0), key.T)
        weight = triton.load(refs["weights"].at[b, t, head], mask=there, other=0)
        score = jnp.sum(jnp.maximum(found * of_keys, 0) * weight[:, None], axis=0)
        triton.store(out.at[b, t, index], score, mask=(index < sizes.positions) & (t < T))
        return ()

    @pl.when(block * BLOCK_KEYS <= position.max())
    def _():
        jax.lax.fori_loop(0, sizes.tokens, one, ())
