"""The reference of attention to whole rows, for kernels.py: row by row and key head by key head, as all scores at once
are 34 GB in float32 for 4 rows of 8,192 tokens and 32 heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.bench.kernel_cases import Whole


def in_turns(s: Whole, plain: Callable[..., Any], sinks: Callable[[], jax.Array | None]) -> Callable[..., Any]:
    """(arrays [rows, length, heads or kv_heads, width], segments [rows, length]) -> results of such shapes, by
    plain(arrays of one row and the heads of one key, segments [1, length], sinks of these heads)."""
    each = s.heads // s.kv_heads

    def apart(a: jax.Array) -> jax.Array:
        """[rows * kv_heads, 1, length, heads of a key, width]."""
        of_keys = a.reshape(s.rows, s.length, s.kv_heads, -1, s.width).transpose(0, 2, 1, 3, 4)
        return of_keys.reshape(s.rows * s.kv_heads, 1, *of_keys.shape[2:])

    def whole(a: jax.Array) -> jax.Array:
        of_keys = a.reshape(s.rows, s.kv_heads, s.length, -1, s.width).transpose(0, 2, 1, 3, 4)
        return of_keys.reshape(s.rows, s.length, -1, s.width)

    def run(*given):
        *arrays, segments = given
        of_heads = jnp.tile((sinks() if s.sinks else jnp.zeros(s.heads)).reshape(-1, each), (s.rows, 1))
        parts = (*map(apart, arrays), jnp.repeat(segments[:, None], s.kv_heads, axis=0), of_heads)
        return jax.tree.map(whole, jax.lax.map(lambda part: plain(*part), parts))

    return run
