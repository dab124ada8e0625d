"""Attention over a paged KV cache: write this step's keys and values into pages, then attend to all of a row's
pages. The reference gathers all pages; page 0 is scrap and takes the writes of padding. Implementations are chosen by
platform: a block of gathered pages at a time, and a kernel that reads them where they lie (paged_kernel.py)."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.ops.attention import MASKED, attend
from shardlm.ops.kv_format import SCALE, from_bits, numbers_each, order_of, packed, to_bits, unpacked

PagedAttention = Literal["blocked", "pallas"]

# Positions that are gathered and attended to at a time: of chunks, and of rows that decode, so many of them together.
# Fewer leave less over beyond a row's end; with 1 to 8 rows together a step took the same time.
CHUNK_BLOCK, DECODE_BLOCK, DECODE_ROWS = 128, 64, 8


def choose(platform: str) -> PagedAttention:
    """The implementation for a platform."""
    chosen: PagedAttention = "pallas" if platform in ("gpu", "cuda") else "blocked"
    logging.vlog(1, "attention over pages: %s, because platform is %s", chosen, platform)
    return chosen


def implementation(name: PagedAttention) -> Callable[..., jax.Array]:
    """`blocked`, or what does the same."""
    if name == "blocked":
        return blocked
    from shardlm.ops.paged_kernel import pallas  # Pallas takes a while to import

    return pallas


def write(
    pages: Mapping[str, jax.Array],
    new: Mapping[str, jax.Array],
    *where: jax.Array,
    implementation: PagedAttention = "blocked",
) -> dict[str, jax.Array]:
    """The pools with each entry of `new` [B, T, K, H] written as this implementation holds it (kv_format.py); `where`
    are the next four arguments of `write_pages`."""
    order = lambda name: order_of(name, pages[name].dtype, implementation)  # noqa: E731
    found = dict(pages)
    for name, numbers in new.items():
        if numbers_each(pages[name]) > 1:
            scaled = name + SCALE in pages
            numbers, scale = packed(numbers, "int8" if scaled else "fp8")
            if scaled:
                found[name + SCALE] = write_pages(pages[name + SCALE], scale, *where, order(name + SCALE))
        elif pages[name].dtype == jnp.uint16:
            numbers = to_bits(numbers)
        found[name] = write_pages(pages[name], numbers, *where, order(name))
    return found


def write_pages(
    pool: jax.Array,
    new: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
    order: str = "pskh",
) -> jax.Array:
    """Stores new [B, T, K, H] at `positions` int32 [B, T] of each row.

    pool [pages, page_size, K, H], its dimensions in the `order` of kv_format.order_of, holds the pages of all layers,
    this layer's from `first_page` on; page_table int32 [B, pages_per_row] counts from there. Rows of `valid` bool [B,
    T] that are False go to the scrap page.
    """
    page_size = pool.shape[order.index("s")]
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1)  # [B, T]
    page = first_page + jnp.where(valid, page, 0)
    at = {"p": page, "s": positions % page_size}
    return pool.at[tuple(at.get(letter, slice(None)) for letter in order)].set(new.astype(pool.dtype))


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
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Each query attends to the positions up to its own, of which it sees the last `window` (0: all). q [B, T, N, H],
    pools [pages, page_size, K, H],
    positions int32 [B, T]; `softcap` and `sinks` as in `attend`; the scales are those of pools of int8; returns q's
    shape."""
    B = q.shape[0]
    table = page_table + first_page
    pools = ((k_pool, k_scale), (v_pool, v_scale))
    k, v = (_numbers(p[table], None if s is None else s[table], q.dtype) for p, s in pools)
    k, v = (a.reshape(B, -1, *a.shape[3:]) for a in (k, v))  # [B, S, K, H]
    distance = positions[:, :, None] - jnp.arange(k.shape[1])  # [B, T, S]
    mask = (distance >= 0) & (distance < (window or k.shape[1]))
    return attend(q, k, v, mask, scale, softcap, sinks)


def _numbers(held: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """Pages [..., K, H], as a pool holds them, in the dtype that is computed in."""
    if held.dtype == jnp.uint16:
        return from_bits(held, dtype)
    return held.astype(dtype) if numbers_each(held) == 1 else unpacked(held, scale, dtype)


def blocked(
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
) -> jax.Array:
    """As the reference, over pools in an order of its own (kv_format.order_of), a block of pages at a time with a
    running softmax (https://arxiv.org/abs/2205.14135), up to the last position of a group of rows: the cost follows the
    rows' lengths and not the page table's width. Blocks beyond a row's own positions change nothing of its output, bit
    for bit.

    Without `v_pool`, values are the first `value_dim` of keys; `head` takes one kv head of the pools. Both are cut
    from gathered pages, as a slice of a pool would be a copy of it.
    """
    pools = {"k_pool": k_pool, "v_pool": v_pool, "k_scale": k_scale, "v_scale": v_scale}
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    some = partial(_blocked, **pools, **options, first_page=first_page, value_dim=value_dim, head=head)
    B, T = positions.shape
    if T > 1 or B <= DECODE_ROWS:
        return some(q, page_table, positions)

    def in_groups(a: jax.Array) -> jax.Array:
        """[B, ...] -> [groups, DECODE_ROWS, ...], with rows of scrap at the end."""
        a = jnp.pad(a, ((0, -B % DECODE_ROWS), *((0, 0),) * (a.ndim - 1)))
        return a.reshape(-1, DECODE_ROWS, *a.shape[1:])

    out = jax.lax.map(lambda group: some(*group), tuple(in_groups(a) for a in (q, page_table, positions)))
    return out.reshape(-1, *out.shape[2:])[:B]


def _blocked(
    q: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    k_pool: jax.Array,
    v_pool: jax.Array | None,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    first_page: jax.Array,
    scale: float,
    window: int,
    softcap: float,
    sinks: jax.Array | None,
    value_dim: int,
    head: jax.Array | None,
) -> jax.Array:
    """All rows at once."""
    B, T, N, _ = q.shape
    turned = order_of("k", k_pool.dtype, "blocked").endswith("hs")
    page_size, width = k_pool.shape[3 if turned else 2], page_table.shape[1]
    block_size = DECODE_BLOCK if T == 1 else CHUNK_BLOCK
    per_block = min(width, max(1, block_size // page_size))
    size = per_block * page_size
    table = jnp.pad(page_table, ((0, 0), (0, -width % per_block))) + first_page
    K = 1 if head is not None else k_pool.shape[1]
    Hv = value_dim if v_pool is None else v_pool.shape[3] * numbers_each(v_pool)
    # XLA:CPU has no product of bfloat16 for every order of dimensions; in float32 it is the same one, exact.
    grouped = jnp.einsum("btkgh->bkgth", q.reshape(B, T, K, N // K, q.shape[3])).astype(jnp.float32)
    of_k = "bkhs" if turned else "bksh"
    of_v = of_k if v_pool is None else "bksh"

    def taken(pool, pages):
        return pool[pages] if head is None else jnp.take(pool[pages], head[None], axis=2)

    def gathered(pool, scale, pages):
        """[B, pages, K, H, page_size] -> [B, K, H, S], and [B, pages, K, page_size, H] -> [B, K, S, H]."""
        found = _numbers(taken(pool, pages), None if scale is None else taken(scale, pages), q.dtype)
        found = found.astype(jnp.float32)
        if turned and pool is k_pool:
            return jnp.einsum("bpkhs->bkhps", found).reshape(B, K, -1, size)
        return jnp.einsum("bpksh->bkpsh", found).reshape(B, K, size, -1)

    def values(k, pages):
        if v_pool is None:
            return k[:, :, :value_dim] if turned else k[..., :value_dim]
        return gathered(v_pool, v_scale, pages)

    def block(i, carry):
        largest, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * per_block, per_block, axis=1)
        k = gathered(k_pool, k_scale, pages)
        v = values(k, pages)
        scores = jnp.einsum(f"bkgth,{of_k}->bkgts", grouped, k) * scale
        if softcap:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = positions[:, :, None] - (i * size + jnp.arange(size))  # [B, T, S]
        mask = ((distance >= 0) & (distance < (window or table.shape[1] * page_size)))[:, None, None]
        new = jnp.maximum(largest, jnp.where(mask, scores, MASKED).max(axis=-1))
        weights = jnp.where(mask, jnp.exp(scores - new[..., None]), 0)
        keep = jnp.exp(largest - new)
        update = jnp.einsum(f"bkgts,{of_v}->bkgth", weights.astype(q.dtype).astype(jnp.float32), v)
        return new, total * keep + weights.sum(axis=-1), out * keep[..., None] + update

    shape = (B, K, N // K, T)
    if sinks is None:
        start = (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32))
    else:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, K, N // K, 1), shape)
        start = (sink, jnp.ones(shape, jnp.float32))
    first = jnp.maximum(jnp.min(positions) - window + 1, 0) // size if window else 0
    stop = jnp.max(positions) // size + 1
    _, total, out = jax.lax.fori_loop(first, stop, block, (*start, jnp.zeros((*shape, Hv), jnp.float32)))
    return jnp.einsum("bkgth->btkgh", out / total[..., None]).reshape(B, T, N, Hv).astype(q.dtype)
