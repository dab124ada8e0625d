"""Attention over rows that are split over the `context` axis, by exchanging the split of the sequence for one of the
heads and back (https://arxiv.org/abs/2309.14509). It runs on one device's arrays, inside a shard_map; tokens are in
natural order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def fits(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Whether the heads of one device can be split over the axis."""
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


def by_heads(a: Any, axis: str) -> Any:
    """Arrays [B, T, N, ...] of this device's part of rows, as whole rows of its share of the heads."""
    return jax.tree.map(lambda a: jax.lax.all_to_all(a, axis, split_axis=2, concat_axis=1, tiled=True), a)


def by_tokens(a: jax.Array, axis: str) -> jax.Array:
    """What `by_heads` made, as it was."""
    return jax.lax.all_to_all(a, axis, split_axis=1, concat_axis=2, tiled=True)


def own_heads(a: Any, axis: str) -> Any:
    """Of arrays [N, ...], those of this device's share of the heads."""

    def own(a: jax.Array) -> jax.Array:
        count = a.shape[0] // jax.lax.axis_size(axis)
        return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(axis) * count, count)

    return jax.tree.map(own, a)


def ulysses(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    attend: Callable,
    sinks: jax.Array | None = None,
    **whole: jax.Array,
) -> jax.Array:
    """attend(q, k, v, segment_ids, sinks=) on whole rows of this device's share of the heads. q [B, T, N, H], k [B, T,
    K, H], v [B, T, K, Hv], segment_ids int32 [B, T] of this device's part of the rows, sinks [N] or None; returns
    [B, T, N, Hv]. Fewer kv heads than devices are repeated, so that each device gets the one its query heads use.
    `whole` are further arguments of `attend`, of whole rows."""
    ranks = jax.lax.axis_size("context")
    copies = max(1, ranks // k.shape[2])
    k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
    q, k, v = by_heads((q, k, v), "context")
    sinks = None if sinks is None else own_heads(sinks, "context")
    out = attend(q, k, v, jax.lax.all_gather(segment_ids, "context", axis=1, tiled=True), sinks=sinks, **whole)
    return by_tokens(out, "context")
