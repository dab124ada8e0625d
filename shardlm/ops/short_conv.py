"""A short causal convolution of each channel by itself, before linear attention (https://arxiv.org/abs/2312.00752,
section 3.4), over packed rows and over what goes on from earlier tokens."""

import jax
import jax.numpy as jnp

from shardlm.errors import ShardlmError


def texts(new: jax.Array) -> jax.Array:
    """new bool [B, T], the first tokens of texts -> int32 [B, T]: which text of its row each token is of, 0 for that
    which goes on from before the row."""
    return jnp.cumsum(new, axis=1, dtype=jnp.int32)


def last_before(text: jax.Array, chunk: int) -> jax.Array:
    """text int32 [B, T] of rows that are whole chunks, but for the last one -> int32 [B, n]: the text of the token
    before each, 0 before the first."""
    count = -(-text.shape[1] // chunk)
    return jnp.concatenate([jnp.zeros_like(text[:, :1]), text[:, chunk - 1 : (count - 1) * chunk : chunk]], axis=1)


def short_conv(x: jax.Array, taps: jax.Array, before: jax.Array, text: jax.Array, spacing: int = 1) -> jax.Array:
    """x [B, T, *C] with taps [*C, W], the last one of which is for the token itself, the others for every `spacing`-th
    one before it; `before` [B, (W - 1) * spacing, *C] the tokens that text 0 goes on from (zeros where there are none)
    and text int32 [B, T]; a token sees no other text. Returns [B, T, *C]."""
    T, W = x.shape[1], taps.shape[-1]
    each = (..., *[None] * (x.ndim - 2))
    whole = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    of = jnp.concatenate([jnp.zeros_like(text, shape=before.shape[:2]), text], axis=1)
    out = x * taps[..., -1]
    for tap in range(W - 1):
        first = tap * spacing
        same = of[:, first : first + T] == text
        out = out + jnp.where(same[each], whole[:, first : first + T], 0) * taps[..., tap]
    return out


def from_device_before(x: jax.Array, segment_ids: jax.Array, count: int, axis: str) -> jax.Array:
    """The `count` tokens [B, count, *C] before this device's part x [B, T, *C] of rows that are split over an axis of
    the mesh, zeros where they are not of its first token's segment; segment_ids int32 [B, T]."""
    if count > x.shape[1]:
        raise ShardlmError(
            f"each device has {x.shape[1]} tokens of a row, split over {axis}, and a short convolution sees {count} "
            f"before its own; use longer rows, or fewer devices over {axis}"
        )
    ways = jax.lax.axis_size(axis)
    to_next = [(i, i + 1) for i in range(ways - 1)]
    before, of = (jax.lax.ppermute(a[:, -count:], axis, to_next) for a in (x, segment_ids))
    return jnp.where((of == segment_ids[:, :1])[(..., *[None] * (x.ndim - 2))], before, 0)


def last_of(x: jax.Array, before: jax.Array, text: jax.Array, valid: jax.Array) -> jax.Array:
    """The tokens that the next ones of a row go on from, as `before` has them: as many of the last of x [B, T, *C] and
    `before`, of the row's last text. valid bool [B, T] is False for padding, which is last."""
    width = before.shape[1]
    kept = jnp.where((text[:, -1] == 0)[(..., *[None] * (x.ndim - 1))], before, 0)
    whole = jnp.concatenate([kept, x.astype(before.dtype)], axis=1)
    at = jnp.sum(valid, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(width)
    return jnp.take_along_axis(whole, at.reshape(*at.shape, *(1,) * (x.ndim - 2)), axis=1)
