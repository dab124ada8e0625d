"""Rotary position embedding."""

import jax
import jax.numpy as jnp


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotates the two halves of each head by position (https://arxiv.org/abs/2104.09864, eq. 34, in the half-split
    order that Llama checkpoints of Hugging Face use). Angles and products are float32.

    x [B, T, N, H] with H even, positions int32 [B, T]; returns x's shape and dtype.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [H/2]
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency  # [B, T, 1, H/2]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
