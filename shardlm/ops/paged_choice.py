"""Sparse attention over pages: an indexer's keys are written into pages of their own, all of a row's are scored, and
its queries attend to the tokens chosen (token_choice.py). How a choice is held goes by the implementation of attention
over pages: a mask over all positions where blocks of pages are gathered, and on GPUs the places of the chosen tokens,
which then are pages of one token each to the kernel that attends: what it reads does not grow with the text."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from shardlm.ops import paged_attention
from shardlm.ops.kv_format import SCALE, numbers_of, order_of
from shardlm.ops.paged_attention import PagedAttention
from shardlm.ops.token_choice import Index, block_of, highest, scores

AT_ONCE = 2**24  # scores of a block of queries
KEYS = 256  # that are gathered and scored at a time

Selection = jax.Array | dict[str, jax.Array]
"""`blocked`: bool [B, T, S] of S = W * page_size positions. `pallas`: "slots" int32 [B, T, count], where the chosen
tokens are in the layer's part of a pool (page * page_size + offset), and "number" int32 [B, T], how many are chosen."""


def shape_of(rows: tuple[int, int], positions: int, count: int, implementation: PagedAttention):
    """Of the choice of `count` among so many positions, by queries [B, T]: its arrays as ShapeDtypeStruct."""
    if implementation == "blocked":
        return jax.ShapeDtypeStruct((*rows, positions), bool)
    return {
        "slots": jax.ShapeDtypeStruct((*rows, count), jnp.int32),
        "number": jax.ShapeDtypeStruct(rows, jnp.int32),
    }


def choose(
    index: Index,
    pools: Mapping[str, jax.Array],
    name: str,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
    implementation: PagedAttention,
    interpret: bool = False,
) -> tuple[Selection | None, dict[str, jax.Array]]:
    """(what each query attends to, None where that is all; the pools with the keys written). The arrays of one device;
    `name` is that of the keys' pool among `pools`, page_table int32 [B, W], positions int32 and valid bool [B, T]."""
    where = (page_table, positions, valid, first_page)
    pools = paged_attention.write(pools, {name: index.k[:, :, None]}, *where, implementation=implementation)
    query = (index.q, index.weights, index.count)
    return among(*query, pools, name, page_table, positions, first_page, implementation, interpret), pools


def among(
    q: jax.Array,
    weights: jax.Array,
    count: int,
    pools: Mapping[str, jax.Array],
    name: str,
    page_table: jax.Array,
    positions: jax.Array,
    first_page: jax.Array,
    implementation: PagedAttention,
    interpret: bool = False,
) -> Selection | None:
    """What queries [B, T, N, H] choose of the keys that are held up to `positions`; arguments as of `choose`."""
    pool, scale = pools[name], pools.get(name + SCALE)
    page_size = pool.shape[order_of(name, pool.dtype, implementation).index("s")]
    B, T = positions.shape
    S = page_table.shape[1] * page_size
    if count >= S:
        return None
    held = {"pool": pool, "scale": scale, "page_table": page_table, "first_page": first_page}

    def by_blocks(q, weights, positions):
        found = _by_blocks(q, weights, positions, **held)
        return highest(found, jnp.arange(S) <= positions[:, :, None], count)

    def by_kernels(q, weights, positions):
        from shardlm.ops.choice_kernel import chosen, scored  # Pallas takes a while to import

        found = scored(q, weights, positions, **held, interpret=interpret)
        return chosen(found, positions, page_table, count, page_size, interpret)

    some = by_kernels if implementation == "pallas" else by_blocks
    size = block_of(T, AT_ONCE // (B * S))
    if size == T:
        return some(q, weights, positions)
    in_blocks = lambda a: jnp.moveaxis(a.reshape(B, T // size, size, *a.shape[2:]), 1, 0)  # noqa: E731
    found = jax.lax.map(lambda part: some(*part), tuple(in_blocks(a) for a in (q, weights, positions)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(B, T, *a.shape[3:]), found)


def _by_blocks(q, weights, positions, *, pool, scale, page_table, first_page) -> jax.Array:
    """float32 [B, T, S], a block of gathered keys at a time, up to the last position of all rows; 0 beyond."""
    page_size, (B, T) = pool.shape[2], positions.shape  # pages, heads, positions, numbers
    per_block = max(1, min(page_table.shape[1], KEYS // page_size))
    S, size = page_table.shape[1] * page_size, per_block * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % per_block))) + first_page

    def block(i, found):
        pages = jax.lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)
        k = numbers_of(pool[pages], None if scale is None else scale[pages], q.dtype)  # [B, pages, 1, page_size, H]
        part = scores(q.astype(jnp.float32), weights, k.reshape(B, size, -1).astype(jnp.float32))
        return jax.lax.dynamic_update_slice_in_dim(found, part, i * size, axis=2)

    found = jnp.zeros((B, T, table.shape[1] * page_size), jnp.float32)
    return jax.lax.fori_loop(0, jnp.max(positions) // size + 1, block, found)[..., :S]


def attend(
    q: jax.Array,
    pool: jax.Array,
    scale_pool: jax.Array | None,
    selection: dict[str, jax.Array],
    first_page: jax.Array,
    scale: float,
    value_dim: int,
    sinks: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """q [B, T, N, H] over the chosen tokens' latents, whose first `value_dim` numbers are values, each of them read
    where it lies in a pool [pages, page_size, 1, H]; returns [B, T, N, value_dim]. sinks [N] are ops/attention.py's. On
    GPUs."""
    from shardlm.ops.paged_kernel import FEW_TOKENS, pallas

    B, T = q.shape[:2]
    one_each = lambda a: a.reshape(-1, 1, *a.shape[2:])  # noqa: E731, of tokens for pages or of queries for rows
    slots, last = selection["slots"].reshape(B * T, -1), selection["number"].reshape(B * T, 1) - 1
    out = pallas(
        one_each(q),
        one_each(pool),
        None,
        slots,
        jnp.maximum(last, 0),  # of padding, which has no tokens
        first_page * pool.shape[1],
        scale,
        k_scale=None if scale_pool is None else one_each(scale_pool),
        value_dim=value_dim,
        sinks=sinks,
        alone=T <= FEW_TOKENS,
        interpret=interpret,
    )
    return out.reshape(B, T, *out.shape[2:])
