"""Attention of each kv head by itself: its queries, keys and values as rows of their own."""

import jax
import jax.numpy as jnp


def by_heads(q: jax.Array, k: jax.Array, v: jax.Array, *rows: jax.Array) -> tuple[jax.Array, ...]:
    """q [B, T, N, H], k and v [B, T, K, H] and `rows` [B, ...] as rows of one kv head each, [B * K, ...]."""
    (B, T, N, H), K = q.shape, k.shape[2]
    q = q.reshape(B, T, K, N // K, H)
    q, k, v = (jnp.moveaxis(a, 2, 1).reshape(B * K, T, -1, a.shape[-1]) for a in (q, k, v))
    return q, k, v, *(jnp.repeat(a, K, axis=0) for a in rows)


def from_heads(out: jax.Array, heads: int) -> jax.Array:
    """out [B * K, T, G, H] of `heads` kv heads, as [B, T, N, H]."""
    _, T, G, H = out.shape
    return jnp.moveaxis(out.reshape(-1, heads, T, G, H), 1, 2).reshape(-1, T, heads * G, H)
