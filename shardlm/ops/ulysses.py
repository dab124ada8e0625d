"""Attention over rows that are split over the `context` axis, by exchanging the split of the sequence for one of the
heads and back (https://arxiv.org/abs/2309.14509). It runs on one device's arrays, inside a shard_map; tokens are in
natural order."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def fits(num_heads: int, num_kv_heads: int, ranks: int) -> bool:
    """Whether the heads of one device can be split over the axis."""
    return num_heads % ranks == 0 and (num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0)


def ulysses(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, attend: Callable, sinks: jax.Array | None = None
) -> jax.Array:
    """attend(q, k, v, segment_ids, sinks=) on whole rows of this device's share of the heads. q [B, T, N, H], k [B, T,
    K, H], v [B, T, K, Hv], segment_ids int32 [B, T] of this device's part of the rows, sinks [N] or None; returns
    [B, T, N, Hv]. Fewer kv heads than devices are repeated, so that each device gets the one its query heads use."""
    ranks = jax.lax.axis_size("context")
    copies = max(1, ranks // k.shape[2])
    k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
    q, k, v = (jax.lax.all_to_all(a, "context", split_axis=2, concat_axis=1, tiled=True) for a in (q, k, v))
    if sinks is not None:
        sinks = jax.lax.dynamic_slice_in_dim(sinks, jax.lax.axis_index("context") * q.shape[2], q.shape[2])
    out = attend(q, k, v, jax.lax.all_gather(segment_ids, "context", axis=1, tiled=True), sinks=sinks)
    return jax.lax.all_to_all(out, "context", split_axis=1, concat_axis=2, tiled=True)
