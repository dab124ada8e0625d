"""The same attention as compressed_rows.py over pages: the last tokens, what compressors read of them, and entries that
stand for several tokens each are rows of as many numbers in pages of one pool (page_layout.py). Every step writes its
tokens and what they are projected to, makes the entries whose windows it completes of what pages hold, and attends to
rows wherever they lie. Nothing but pages is kept of a text, so that prefixes are shared, drafts taken back and requests
computed anew as with any model.

A list of places says what a query attends to: its last tokens, the newest first, and then entries. On GPUs these are
pages of one token each to the kernel that attends."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlm.ops import paged_attention, paged_choice
from shardlm.ops.attention import attend
from shardlm.ops.compression import Compressed, Series, entries
from shardlm.ops.kv_format import numbers_of, order_of, pool_shape
from shardlm.ops.paged_attention import PagedAttention
from shardlm.ops.token_choice import block_of

GATHERED_BYTES = 2**26  # of rows that are gathered for a block of queries, where no kernel reads them


class Spot(NamedTuple):
    """Where a layer has one kind of row: the pages of its tokens or entries int32 [B, W], and its own first page.
    `parts`: of how many layers a page holds entries, one after the other, of which this one has `part`."""

    table: jax.Array
    first: jax.Array
    part: jax.Array
    parts: int = 1


class Pools(NamedTuple):
    """`held`: by name, pools of one row of numbers at a place (kv_format.py); the names of those that rows and the
    choosers' entries are in; how they are read."""

    held: Mapping[str, jax.Array]
    rows: str
    index: str
    reads: PagedAttention

    def page_size(self, name: str) -> int:
        return self.held[name].shape[self._order(name).index("s")]

    def flat(self, name: str) -> jax.Array:
        """[places, H]."""
        return self.held[name].reshape(-1, self.held[name].shape[-1])

    def taken(self, name: str, places: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Rows at places int32 [...] -> [..., H]."""
        return numbers_of(self.flat(name)[places][..., None, :], None, dtype)[..., 0, :]

    def written(self, name: str, new: jax.Array, spot: Spot, positions: jax.Array, valid: jax.Array) -> "Pools":
        """With new [B, T, H] at `positions` of a spot, tokens' or entries'."""
        pool, order = self.held[name], self._order(name)
        size, width = self.page_size(name) // spot.parts, pool.shape[-1]
        parted = pool.reshape(pool_shape(order, pool.size // (size * width), size, 1, width))
        where = (spot.table * spot.parts + spot.part, positions, valid, spot.first * spot.parts)
        found = paged_attention.write({name: parted}, {name: new[:, :, None]}, *where, implementation=self.reads)
        return self._replace(held={**self.held, name: found[name].reshape(pool.shape)})

    def places(self, name: str, spot: Spot, positions: jax.Array) -> jax.Array:
        """Of tokens or entries at `positions` int32 [B, n] of a spot; of those beyond its pages, of some."""
        size = self.page_size(name) // spot.parts
        positions = jnp.clip(positions, 0, spot.table.shape[1] * size - 1)
        page = (spot.first + jnp.take_along_axis(spot.table, positions // size, axis=1)) * spot.parts + spot.part
        return page * size + positions % size

    def _order(self, name: str) -> str:
        order = order_of(name, self.held[name].dtype, self.reads)
        assert order.endswith("h"), "rows lie whole"
        return order


def rows_of_widths(numbers: Sequence[int], width: int) -> int:
    """How many rows of `width` numbers hold so many, each beginning in a row of its own."""
    return sum(-(-each // width) for each in numbers)


def attend_pages(
    q: jax.Array,
    kv: jax.Array,
    compressed: Compressed | None,
    pools: Pools,
    spots: Sequence[Spot],
    positions: jax.Array,
    valid: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    window: int,
    interpret: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """q [B, T, N, H], kv [B, T, H], positions int32 and valid bool [B, T]; the arrays of one device. `spots`: of the
    tokens' keys, of each row of what the series is made of, and of the chooser's, and of the entries. Returns q's shape
    and the pools."""
    B, T = positions.shape
    own, *beside = spots
    pools = pools.written(pools.rows, kv, own, positions, valid)
    reach = jnp.broadcast_to(positions[:, :, None] - jnp.arange(window), (B, T, window))
    places = pools.places(pools.rows, own, reach.reshape(B, -1)).reshape(reach.shape)
    number = jnp.minimum(positions + 1, window)
    if compressed:
        pools, of_entries, more = _of_entries(compressed, pools, beside, positions, valid, interpret)
        at = jnp.arange(window + of_entries.shape[2]) - jnp.zeros_like(number)[:, :, None]
        near = jnp.take_along_axis(places, jnp.minimum(at, window - 1), axis=2)
        behind = jnp.clip(at - number[:, :, None], 0, of_entries.shape[2] - 1)
        places = jnp.where(at < number[:, :, None], near, jnp.take_along_axis(of_entries, behind, axis=2))
        number = number + more
    out = _attended(q, pools, places, jnp.maximum(number, 1), sinks, scale, interpret)
    return out, dict(pools.held)


def _of_entries(compressed: Compressed, pools: Pools, spots: Sequence[Spot], positions, valid, interpret: bool):
    """(the pools with the entries written that this step completes, the places of those that each query attends to
    int32 [B, T, n], how many they are)."""
    series, chooser, (*raws, spot) = compressed.series, compressed.chooser, spots
    width = pools.held[pools.rows].shape[-1]
    count = rows_of_widths([math.prod(series.raw.shape[2:])], width)
    pools = _made(series, pools, pools.rows, raws[:count], spot, positions, valid)
    seen = (positions + 1) // series.rate
    size = pools.page_size(pools.rows) // spot.parts
    if chooser:
        pools = _made(chooser.series, pools, pools.index, raws[count:], spot, positions, valid)
        query = (chooser.q, chooser.weights, chooser.count)
        where = (spot.table, seen - 1, spot.first, pools.reads, interpret)
        selection = paged_choice.among(*query, pools.held, pools.index, *where)
        if isinstance(selection, dict):
            return pools, selection["slots"] + spot.first * size, selection["number"]
        if selection is not None:  # a mask of all of them
            listed = jnp.argsort(~selection, axis=2, stable=True)[:, :, : chooser.count].astype(jnp.int32)
            places = pools.places(pools.rows, spot, listed.reshape(len(listed), -1)).reshape(listed.shape)
            return pools, places, jnp.sum(selection, axis=2, dtype=jnp.int32)
    every = jnp.broadcast_to(jnp.arange(spot.table.shape[1] * size), (len(positions), spot.table.shape[1] * size))
    places = pools.places(pools.rows, spot, every)[:, None]
    return pools, jnp.broadcast_to(places, (*positions.shape, places.shape[2])), seen


def _made(series: Series, pools: Pools, name: str, raws: Sequence[Spot], spot: Spot, positions, valid) -> Pools:
    """The pools with what this step's tokens are projected to, and with the entries whose windows end in it."""
    B, T = positions.shape
    width, C = pools.held[pools.rows].shape[-1], math.prod(series.raw.shape[2:])
    raw = jnp.pad(series.raw.reshape(B, T, C), ((0, 0), (0, 0), (0, len(raws) * width - C)))
    for row, where in enumerate(raws):
        pools = pools.written(pools.rows, raw[:, :, row * width : (row + 1) * width], where, positions, valid)
    rate, J = series.rate, -(-(T - 1) // series.rate) + 1
    entry = positions[:, :1] // rate + jnp.arange(J)  # [B, J]
    end = positions[:, :1] + jnp.sum(valid, axis=1, keepdims=True, dtype=jnp.int32)
    tokens = (entry[:, :, None] - (series.windows - 1)) * rate + jnp.arange(series.windows * rate)
    of_rows = [pools.places(pools.rows, where, tokens.reshape(B, -1)) for where in raws]
    found = [pools.taken(pools.rows, places, series.raw.dtype) for places in of_rows]
    found = jnp.concatenate(found, axis=-1)[..., :C].reshape(B, J, -1, *series.raw.shape[2:])
    new = entries(series, found, entry * rate)
    return pools.written(name, new, spot, entry, (entry + 1) * rate <= end)


def _attended(q, pools: Pools, places, number, sinks, scale: float, interpret: bool) -> jax.Array:
    """q [B, T, N, H] over the first `number` int32 [B, T] of its places int32 [B, T, n]."""
    B, T, N, H = q.shape
    if pools.reads == "pallas":
        from shardlm.ops.paged_kernel import FEW_TOKENS, pallas  # Pallas takes a while to import

        one_each = pools.flat(pools.rows)[:, None, None]
        listed, last = places.reshape(B * T, -1), number.reshape(B * T, 1) - 1
        how = {"sinks": sinks, "value_dim": H, "alone": T <= FEW_TOKENS, "interpret": interpret}
        out = pallas(q.reshape(B * T, 1, N, H), one_each, None, listed, last, jnp.int32(0), scale, **how)
        return out.reshape(q.shape)

    def block(part):
        q, places, number = part
        keys = pools.taken(pools.rows, places, q.dtype)[:, :, None]
        return attend(q, keys, keys, (jnp.arange(places.shape[1]) < number)[:, None], scale, sinks=sinks)

    rows = (q.reshape(B * T, 1, N, H), places.reshape(B * T, -1), number.reshape(B * T, 1))
    size = block_of(B * T, max(1, GATHERED_BYTES // (4 * H * places.shape[2])))
    in_blocks = tuple(a.reshape(B * T // size, size, *a.shape[1:]) for a in rows)
    out = block(tuple(a[0] for a in in_blocks)) if size == B * T else jax.lax.map(block, in_blocks)
    return out.reshape(q.shape)
