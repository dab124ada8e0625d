"""Normalisation of activations."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dimension, computed in float32 (https://arxiv.org/abs/1910.07467, eq. 4).

    x [..., D] any float dtype, scale [D]; returns x's shape and dtype.
    """
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Norm of mean and variance over the last dimension, computed in float32 (https://arxiv.org/abs/1607.06450, eq. 4).

    x [..., D] any float dtype, scale and bias [D]; returns x's shape and dtype.
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
