"""Attention over a paged KV cache: write this step's keys and values into pages, then attend to all of a row's
pages. The reference gathers all pages; page 0 is scrap, which nothing is written to. Implementations are chosen by
platform: a block of gathered pages at a time, or of a token's large ones on few cores where they lie (paged_rows.py);
and a kernel that reads them there (paged_kernel.py)."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.ops import paged_rows
from shardlm.ops.attention import MASKED, attend
from shardlm.ops.kv_format import SCALE, numbers_each, numbers_of, order_of, packed, to_bits

PagedAttention = Literal["blocked", "pallas"]

# Positions that are gathered and attended to at a time: of chunks and of rows that decode, of these with small pages;
# so many rows together; and positions of pages that are not put together again.
#
# What XLA:CPU makes of a block's gather takes most of it: numbers of small pages, put together head by head, 0.46 to
# 0.64 ns each and thread, those of a page of 64 as it lies 0.26, which is what the memory gives. Attention of 12 layers
# of 12 heads, 4 of keys, over 8 and 32 rows, two quiet cores, ms a step at position 60, 160, 500 and 900:
#
# - pages of 16, blocks of 64:    2.5, 6.1, 15.1, 26.9 and 8.4, 32, 64, 106
# - pages of 64, blocks of 64:    2.0, 4.7, 11.4, 20.6 and 6.2, 17, 42, 76
# - pages of 64, blocks of 128:   3.3, 6.1, 11.8, 22.8 and 12, 24, 49, 121 put together; apart, as it is, 2.6, 4.4, 9.4
#   to 11, 15.7 and 9.6, 16, 31, 61
# - pages of 128, blocks of 128:  2.6, 4.5, 8.7, 16.3 and 8.5, 16, 30, 58
#
# With 1, 2, 4 or 8 rows together the same (pages of 16).
CHUNK_BLOCK, DECODE_BLOCK, SMALL_PAGES_BLOCK, DECODE_ROWS, APART = 128, 128, 64, 8, 64


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
    this layer's from `first_page` on; page_table int32 [B, pages_per_row] counts from there. What `valid` bool [B, T]
    is False of, and what belongs into the scrap page, is written nowhere: each has a place beyond the pool of its own,
    so that no two places are equal, and XLA need not write by compare-and-swap. On an H200 384 tokens of padding that
    all went to one place took 3.3 ms, twice a layer: 214 of 227 ms of a prompt of 128 tokens (Llama 3 8B, measured).
    """
    page_size, beyond = pool.shape[order.index("s")], pool.shape[order.index("p")]
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1)  # [B, T]
    nowhere = beyond + jnp.arange(page.size, dtype=jnp.int32).reshape(page.shape)
    page = jnp.where(valid & (page > 0), first_page + page, nowhere)
    at = {"p": page, "s": positions % page_size}
    index = tuple(at.get(letter, slice(None)) for letter in order)
    return pool.at[index].set(new.astype(pool.dtype), mode="drop", unique_indices=True)


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
    chunk: int = 0,
    until: jax.Array | None = None,
) -> jax.Array:
    """Each query attends to the positions up to its own, of which it sees the last `window` (0: all) or, where texts
    are cut into chunks, those of its own `chunk`; where there is `until` int32 [B, T] it sees those after it too, up to
    that. q [B, T, N, H],
    pools [pages, page_size, K, H], positions int32 [B, T]; `softcap` and `sinks` as in `attend`; the scales are those
    of pools of int8; returns q's shape."""
    B = q.shape[0]
    table = page_table + first_page
    pools = ((k_pool, k_scale), (v_pool, v_scale))
    k, v = (numbers_of(p[table], None if s is None else s[table], q.dtype) for p, s in pools)
    k, v = (a.reshape(B, -1, *a.shape[3:]) for a in (k, v))  # [B, S, K, H]
    mask = _sees(positions, until, jnp.arange(k.shape[1]), _reach(positions, window, chunk, k.shape[1]))
    return attend(q, k, v, mask, scale, softcap, sinks)


def _reach(positions: jax.Array, window: int, chunk: int, every: int) -> jax.Array:
    """How many positions each query sees, itself included, [B, T, 1]; `every`: as many as there are."""
    return (positions % chunk + 1)[..., None] if chunk else jnp.full((1, 1, 1), window or every)


def _sees(positions: jax.Array, until: jax.Array | None, keys: jax.Array, reach: jax.Array) -> jax.Array:
    """Which `keys` [S] each query sees, bool [B, T, S]."""
    distance = positions[:, :, None] - keys
    return (distance >= 0 if until is None else keys <= until[:, :, None]) & (distance < reach)


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
    chunk: int = 0,
    chosen: jax.Array | None = None,
    until: jax.Array | None = None,
    with_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """As the reference, over pools in an order of its own (kv_format.order_of), a block of pages at a time with a
    running softmax (https://arxiv.org/abs/2205.14135), up to the last position of a group of rows: the cost follows the
    rows' lengths and not the page table's width. Blocks beyond a row's own positions change nothing of its output, bit
    for bit.

    Without `v_pool`, values are the first `value_dim` of keys; `head` takes one kv head of the pools. Both are cut
    from gathered pages, as a slice of a pool would be a copy of it. `chosen` bool [B, T, S]: of the positions of a
    row's pages, those that each query attends to. `with_lse`: (that, the log-partition of the scores, float32 [B, T,
    N]).
    """
    pools = _Pools(k_pool, v_pool, k_scale, v_scale, value_dim, head)
    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "chunk": chunk}
    options |= {"with_lse": with_lse}
    in_place = until is None and pools.in_place(q, chosen)
    some = partial(_blocked, pools=pools, in_place=in_place, first_page=first_page, **options)
    B, T = positions.shape
    rows = (q, page_table, positions) + (() if chosen is None else (chosen,))
    if until is not None:
        return some(*rows, until=until)
    if T > 1 or B <= DECODE_ROWS or in_place:
        return some(*rows)

    def in_groups(a: jax.Array) -> jax.Array:
        """[B, ...] -> [groups, DECODE_ROWS, ...], with rows of scrap at the end."""
        a = jnp.pad(a, ((0, -B % DECODE_ROWS), *((0, 0),) * (a.ndim - 1)))
        return a.reshape(-1, DECODE_ROWS, *a.shape[1:])

    out = jax.lax.map(lambda group: some(*group), tuple(in_groups(a) for a in rows))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:B], out)


@dataclasses.dataclass(frozen=True)
class _Pools:
    """Keys and values as they are held, with the arguments of `blocked` that say which part of them is attended to."""

    k: jax.Array
    v: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    value_dim: int
    head: jax.Array | None

    @property
    def turned(self) -> bool:
        """Whether keys lie [pages, K, H, page_size]; else they do as values, [pages, K, page_size, H]."""
        return order_of("k", self.k.dtype, "blocked").endswith("hs")

    def letters(self, apart: bool) -> tuple[str, str]:
        """Of the keys and of the values of a block, its pages apart or put together."""
        b = "bp" if apart else "b"
        of_k = f"{b}khs" if self.turned else f"{b}ksh"
        return of_k, of_k if self.v is None else f"{b}ksh"

    @property
    def page_size(self) -> int:
        return self.k.shape[3 if self.turned else 2]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1] if self.head is None else 1

    @property
    def width(self) -> int:
        """Numbers of a value."""
        return self.value_dim if self.v is None else self.v.shape[3] * numbers_each(self.v)

    def in_place(self, q: jax.Array, chosen: jax.Array | None) -> bool:
        """Whether pages are read where they lie (paged_rows.py) rather than gathered."""
        cut = self.v is None or self.head is not None or chosen is not None
        return not cut and paged_rows.suits(q, self.k, self.v)

    def block(self, pages: jax.Array, dtype: jnp.dtype, apart: bool) -> tuple[jax.Array, jax.Array]:
        """Keys and values at the positions of pages int32 [B, n], rounded to `dtype`, float32 in the order of
        `letters`."""
        k = self._gathered(self.k, self.k_scale, pages, dtype, apart, self.turned)
        if self.v is not None:
            return k, self._gathered(self.v, self.v_scale, pages, dtype, apart, False)
        return k, k[..., : self.value_dim, :] if self.turned else k[..., : self.value_dim]

    def _gathered(self, pool, scale, pages: jax.Array, dtype: jnp.dtype, apart: bool, turned: bool) -> jax.Array:
        held = numbers_of(self._taken(pool, pages), None if scale is None else self._taken(scale, pages), dtype)
        held = held.astype(jnp.float32)
        if apart:
            return held
        held = jnp.einsum("bpkhs->bkhps" if turned else "bpksh->bkpsh", held)
        return held.reshape(*held.shape[:3], -1) if turned else held.reshape(*held.shape[:2], -1, held.shape[4])

    def _taken(self, pool: jax.Array, pages: jax.Array) -> jax.Array:
        """Whole pages, each a row of numbers: XLA:CPU works out where each number of a gather lies."""
        rows = pool.reshape(pool.shape[0], -1)[pages.reshape(-1)]
        held = rows.reshape(*pages.shape, *pool.shape[1:])
        return held if self.head is None else jnp.take(held, self.head[None], axis=2)


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """A block of gathered pages at a time, which stay apart or are put together: `per_block` of table int32 [B, pages],
    a multiple of that."""

    pools: _Pools
    table: jax.Array
    per_block: int
    apart: bool
    dtype: jnp.dtype

    @staticmethod
    def of(pools: _Pools, page_table: jax.Array, first_page: jax.Array, T: int, dtype: jnp.dtype) -> "_Gathered":
        """For `T` tokens a row; `page_table` counts from `first_page`."""
        width, apart = page_table.shape[1], T == 1 and pools.page_size >= APART
        block_size = CHUNK_BLOCK if T > 1 else DECODE_BLOCK if apart else SMALL_PAGES_BLOCK
        per_block = min(width, max(1, block_size // pools.page_size))
        table = jnp.pad(page_table, ((0, 0), (0, -width % per_block))) + first_page
        return _Gathered(pools, table, per_block, apart, dtype)

    def products(self, i: jax.Array, q: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Scores of q [B, K, G, T, H] in block `i`, [B, K, G, T, S] or, of pages apart, [B, pages, K, G, T, S]; and
        what makes of weights like them the values, [B, K, G, T, H]."""
        (of_k, of_v), b = self.pools.letters(self.apart), "bp" if self.apart else "b"
        pages = jax.lax.dynamic_slice_in_dim(self.table, i * self.per_block, self.per_block, axis=1)
        k, v = self.pools.block(pages, self.dtype, self.apart)
        if not self.apart:
            return jnp.einsum(f"bkgth,{of_k}->bkgts", q, k), lambda w: jnp.einsum(f"bkgts,{of_v}->bkgth", w, v)
        q = jnp.broadcast_to(q[:, None], (q.shape[0], self.per_block, *q.shape[1:]))
        scores = jnp.einsum(f"{b}kgth,{of_k}->{b}kgts", q, k)
        return scores, lambda w: jnp.einsum(f"{b}kgts,{of_v}->{b}kgth", w, v).sum(axis=1)


def _blocked(
    q: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    chosen: jax.Array | None = None,
    until: jax.Array | None = None,
    *,
    pools: _Pools,
    in_place: bool,
    first_page: jax.Array,
    scale: float,
    window: int,
    softcap: float,
    sinks: jax.Array | None,
    chunk: int,
    with_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """All rows at once."""
    (B, T, N, H), K = q.shape, pools.num_kv_heads
    if in_place:
        last = positions[:, 0] // pools.page_size
        blocks = paged_rows.Rows.of(pools.k, pools.v, page_table + first_page, last, q.dtype)
    else:
        blocks = _Gathered.of(pools, page_table, first_page, T, q.dtype)
    size, every = blocks.per_block * pools.page_size, blocks.table.shape[1] * pools.page_size
    if chosen is not None:
        chosen = jnp.pad(chosen, ((0, 0), (0, 0), (0, every - chosen.shape[2])))
    # In the order of the scores, or XLA turns their product around; and in float32, which is the same product, exact:
    # XLA:CPU has none of bfloat16 for every order of dimensions.
    grouped = jnp.einsum("btkgh->bkgth", q.reshape(B, T, K, N // K, H)).astype(jnp.float32)
    reach = _reach(positions, window, chunk, every)

    def block(i, carry):
        scores, summed = blocks.products(i, grouped)
        mask = _sees(positions, until, i * size + jnp.arange(size), reach)
        if chosen is not None:
            mask &= jax.lax.dynamic_slice_in_dim(chosen, i * size, size, axis=2)
        if blocks.apart:
            mask = jnp.einsum("btps->bpts", mask.reshape(B, T, blocks.per_block, -1))
        return _with_block(carry, _capped(scores * scale, softcap), mask[..., None, None, :, :], summed, q.dtype)

    least = jnp.min(positions)
    first = jnp.maximum(least - window + 1, 0) // size if window else least // chunk * chunk // size if chunk else 0
    stop = jnp.max(positions if until is None else until) // size + 1
    largest, total, out = jax.lax.fori_loop(first, stop, block, _start((B, K, N // K, T), pools.width, sinks))
    out = jnp.einsum("bkgth->btkgh", out / total[..., None]).reshape(B, T, N, pools.width).astype(q.dtype)
    if not with_lse:
        return out
    return out, jnp.einsum("bkgt->btkg", largest + jnp.log(total)).reshape(B, T, N)


def _capped(scores: jax.Array, softcap: float) -> jax.Array:
    return softcap * jnp.tanh(scores / softcap) if softcap else scores


Carry = tuple[jax.Array, jax.Array, jax.Array]  # largest score, sum of weights [B, K, G, T], values [B, K, G, T, H]


def _start(shape: tuple[int, ...], width: int, sinks: jax.Array | None) -> Carry:
    """Before the first block, for rows of this [B, K, G, T] and values of `width`."""
    out = jnp.zeros((*shape, width), jnp.float32)
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), out
    sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1), shape)
    return sink, jnp.ones(shape, jnp.float32), out


def _with_block(carry: Carry, scores: jax.Array, mask: jax.Array, summed: Callable, dtype: jnp.dtype) -> Carry:
    """After a block more, its scores [B, K, G, T, S] or with its pages apart; weights are rounded to `dtype`."""
    largest, total, out = carry
    over = (4,) if scores.ndim == 5 else (1, 5)  # the dimensions of scores that are summed over
    new = jnp.maximum(largest, jnp.where(mask, scores, MASKED).max(axis=over))
    weights = jnp.where(mask, jnp.exp(scores - jnp.expand_dims(new, over)), 0)
    keep = jnp.exp(largest - new)
    update = summed(weights.astype(dtype).astype(jnp.float32))
    return new, total * keep + weights.sum(axis=over), out * keep[..., None] + update
