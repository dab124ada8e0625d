"""Mixtures whose result takes a shortcut past the next layer (https://arxiv.org/abs/2404.05019; LongCat Flash,
https://arxiv.org/abs/2509.01322, section 2.2): what experts make of what a dense MLP reads too is added to the stream
behind the next block's MLP, so that moving tokens to experts has a block's time.

Between blocks the stream of a token and what is still to be added lie side by side, [B, T, 2 * D]."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ShortcutConfig:
    """Of all blocks: those with a mixture, whose shared expert is the dense MLP, begin a shortcut, others end it."""

    count = 2  # the stream, and what is to be added


def parted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [B, T, 2 * D] -> (the stream, what is to be added), [B, T, D]."""
    return tuple(jnp.split(x, 2, axis=-1))


def together(stream: jax.Array, later: jax.Array) -> jax.Array:
    """And back."""
    return jnp.concatenate([stream, later.astype(stream.dtype)], axis=-1)
