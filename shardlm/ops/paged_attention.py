"""Attention over a paged KV cache: write this step's keys and values into pages, then attend to all of a row's
pages. The reference gathers the pages; page 0 is scrap and takes the writes of padding."""

import jax
import jax.numpy as jnp

from shardlm.ops.attention import attend


def write_pages(
    pool: jax.Array,
    new: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
) -> jax.Array:
    """Stores new [B, T, K, H] at `positions` int32 [B, T] of each row.

    pool [pages, page_size, K, H] holds the pages of all layers, this layer's from `first_page` on; page_table int32
    [B, pages_per_row] counts from there. Rows of `valid` bool [B, T] that are False go to the scrap page.
    """
    page_size = pool.shape[1]
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1)  # [B, T]
    page = first_page + jnp.where(valid, page, 0)
    return pool.at[page, positions % page_size].set(new.astype(pool.dtype))


def reference(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    first_page: jax.Array,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Each query attends to the positions up to its own, of which it sees the last `window` (0: all). q [B, T, N, H],
    positions int32 [B, T]; `softcap` and `sinks` as in `attend`; returns q's shape."""
    B = q.shape[0]
    table = page_table + first_page
    k, v = (pool[table].reshape(B, -1, *pool.shape[2:]) for pool in (k_pool, v_pool))  # [B, S, K, H]
    distance = positions[:, :, None] - jnp.arange(k.shape[1])  # [B, T, S]
    mask = (distance >= 0) & (distance < (window or k.shape[1]))
    return attend(q, k.astype(q.dtype), v.astype(q.dtype), mask, scale, softcap, sinks)
