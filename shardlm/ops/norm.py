"""Normalisation of activations. The backward pass keeps a norm's input as it came and one or two float32 numbers a
row: autodiff keeps the float32 copies of it too, of an 8B model with everything kept 3 GiB a layer that are written,
stacked and read back."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last dimension, computed in float32 (https://arxiv.org/abs/1910.07467, eq. 4).

    x [..., D] any float dtype, scale [D]; returns x's shape and dtype.
    """
    return _rms_forward(x, scale, eps)[0]


def _rms_forward(x, scale, eps):
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * inverse * scale.astype(jnp.float32)).astype(x.dtype), (x, inverse, scale)


def _rms_backward(eps, kept, d_out):
    del eps
    x, inverse, scale = kept
    normed, d_out = x.astype(jnp.float32) * inverse, d_out.astype(jnp.float32)
    d_normed = d_out * scale.astype(jnp.float32)
    along = jnp.mean(d_normed * normed, axis=-1, keepdims=True)
    return ((d_normed - normed * along) * inverse).astype(x.dtype), _over_rows(d_out * normed, scale)


rms_norm.defvjp(_rms_forward, _rms_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Norm of mean and variance over the last dimension, computed in float32 (https://arxiv.org/abs/1607.06450, eq. 4).

    x [..., D] any float dtype, scale and bias [D]; returns x's shape and dtype.
    """
    return _layer_forward(x, scale, bias, eps)[0]


def _layer_forward(x, scale, bias, eps):
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=-1, keepdims=True)
    centred = x32 - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    out = (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
    return out, (x, mean, inverse, scale, bias)


def _layer_backward(eps, kept, d_out):
    del eps
    x, mean, inverse, scale, bias = kept
    normed, d_out = (x.astype(jnp.float32) - mean) * inverse, d_out.astype(jnp.float32)
    d_normed = d_out * scale.astype(jnp.float32)
    average, along = (jnp.mean(a, axis=-1, keepdims=True) for a in (d_normed, d_normed * normed))
    d_x = ((d_normed - average - normed * along) * inverse).astype(x.dtype)
    return d_x, _over_rows(d_out * normed, scale), _over_rows(d_out, bias)


layer_norm.defvjp(_layer_forward, _layer_backward)


def _over_rows(a: jax.Array, like: jax.Array) -> jax.Array:
    """[..., D] summed to [D], in `like`'s dtype."""
    return jnp.sum(a, axis=tuple(range(a.ndim - 1))).astype(like.dtype)
