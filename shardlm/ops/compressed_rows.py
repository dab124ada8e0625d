"""Attention of packed rows to the last tokens and to entries that stand for several tokens each (compression.py), under
one softmax: DeepSeek V4. In blocks of queries, each of which sees a slice of the tokens and all entries."""

import dataclasses
import functools
import math
from functools import partial

import jax
import jax.numpy as jnp

from shardlm.ops.attention import attend
from shardlm.ops.compression import Chooser, Compressed, Ends, entries_of_rows
from shardlm.ops.token_choice import highest, scores

SCORES_BYTES = 2**28  # of all heads' scores of a block of queries
ANEW = 128  # queries that the kernels of one more block take as long as


@functools.lru_cache(maxsize=4096)
def queries_at_once(T: int, each: float, window: int, entries: int) -> int:
    """How many of T queries make a block, a divisor of T. each: rows times heads; entries: of a row.

    A block is multiplied with the tokens of all its queries' windows. In one block of 4,096 a query with a window of
    128 and 32 entries met 4,255 keys, in blocks of 128 it meets 287."""
    low = [size for size in range(1, math.isqrt(T) + 1) if T % size == 0]
    keys = {size: window - 1 + size + entries for size in {*low, *(T // size for size in low)}}
    fitting = [size for size, met in keys.items() if 4 * each * size * met <= SCORES_BYTES] or [1]
    return min(fitting, key=lambda size: (keys[size] * (1 + ANEW / size), size))


def attend_rows(
    q: jax.Array,
    kv: jax.Array,
    compressed: Compressed | None,
    positions: jax.Array,
    segment_ids: jax.Array,
    sinks: jax.Array,
    *,
    scale: float,
    window: int,
    over: str = "",
) -> jax.Array:
    """q [B, T, N, H], kv [B, T, H], which are keys and values of all heads, positions and segment_ids int32 [B, T],
    sinks [N]; the arrays of one device. A query sees `window` tokens, itself included, and the entries whose windows
    are complete. Returns q's shape.

    `over`: the mesh axis that rows are split over, in natural order. What entries are made of is gathered over it.
    """
    B, T, N, _ = q.shape
    of_keys, first = segment_ids, 0
    if over:
        first = jax.lax.axis_index(over) * T
        gather = partial(jax.lax.all_gather, axis_name=over, axis=1, tiled=True)
        kv, positions, of_keys = gather(kv), gather(positions), gather(segment_ids)
        compressed = compressed and _gathered(compressed, gather)
    made, ends, of_index = None, None, None
    if compressed:
        ends = Ends.of(positions, of_keys, compressed.series.rate)
        made = entries_of_rows(compressed.series, ends)
        if compressed.chooser and ends.last.shape[1] > compressed.chooser.count:
            of_index = jax.lax.stop_gradient(entries_of_rows(compressed.chooser.series, ends))
    size = queries_at_once(T, B * N, window, 0 if made is None else made.shape[1])
    padded = jnp.pad(kv, ((0, 0), (window - 1, 0), (0, 0)))
    of_padded = jnp.pad(of_keys, ((0, 0), (window - 1, 0)))

    def block(start):
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1)  # noqa: E731, of this device's queries
        near = lambda a: jax.lax.dynamic_slice_in_dim(a, first + start, window - 1 + size, axis=1)  # noqa: E731
        own = part(segment_ids)[:, :, None]
        distance = jnp.arange(size)[:, None] + window - 1 - jnp.arange(window - 1 + size)
        keys, mask = near(padded), (own == near(of_padded)[:, None]) & (distance >= 0) & (distance < window)
        if made is not None:
            place = first + start + jnp.arange(size)[:, None]
            seen = (own == ends.segment[:, None]) & (ends.last[:, None] <= place) & (ends.segment > 0)[:, None]
            if of_index is not None:
                seen = _chosen(compressed.chooser, part, of_index, seen)
            keys, mask = jnp.concatenate([keys, made], axis=1), jnp.concatenate([mask, seen], axis=2)
        keys = keys[:, :, None]
        return attend(part(q), keys, keys, mask, scale, sinks=sinks)

    if size == T:
        return block(jnp.int32(0))
    out = jax.lax.map(jax.checkpoint(block), jnp.arange(0, T, size))  # [blocks, B, size, N, H]
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _chosen(chooser: Chooser, part, of_index: jax.Array, seen: jax.Array) -> jax.Array:
    found = scores(part(chooser.q), part(chooser.weights), of_index)
    return highest(found, seen, chooser.count)


def _gathered(compressed: Compressed, gather) -> Compressed:
    """With the raw numbers of whole rows; queries stay where they are."""
    whole = lambda series: dataclasses.replace(series, raw=gather(series.raw))  # noqa: E731
    chooser = compressed.chooser
    return Compressed(whole(compressed.series), chooser and dataclasses.replace(chooser, series=whole(chooser.series)))
