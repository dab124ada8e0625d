"""Matrices made positive and then such that their rows and columns sum to 1, by dividing by both sums in turn (Sinkhorn
and Knopp; manifold-constrained hyper-connections, https://arxiv.org/abs/2512.24880, eq. 9)."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def sums_of_one(scores: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Softmax of the rows of scores float32 [B, T, S, S]; then columns, `iterations` times, and rows between them are
    divided by their sums, beside each of which stands eps. The arrays of one device: inside shard_map where a mesh
    splits them."""
    how = {"iterations": iterations, "eps": eps}
    from shardlm.ops import sums_of_one_kernel  # Pallas takes a while to import

    kernel = functools.partial(sums_of_one_kernel.pallas, **how)
    return jax.lax.platform_dependent(scores, cuda=kernel, default=functools.partial(reference, **how))


def reference(scores: jax.Array, iterations: int, eps: float) -> jax.Array:
    """As `sums_of_one`, a matrix at a time."""

    def divided(mix, axis):
        return mix / (jnp.sum(mix, axis=axis, keepdims=True) + eps)

    mix = divided(jax.nn.softmax(scores, axis=-1) + eps, -2)
    for _ in range(iterations - 1):
        mix = divided(divided(mix, -1), -2)
    return mix


def gradient(scores: jax.Array, given: jax.Array, iterations: int, eps: float) -> jax.Array:
    """Of `reference`, where its matrices have the gradients `given`."""
    [made] = jax.vjp(functools.partial(reference, iterations=iterations, eps=eps), scores)[1](given)
    return made


def _forward(scores, iterations, eps):
    return sums_of_one(scores, iterations, eps), scores


def _backward(iterations, eps, scores, given):
    how = {"iterations": iterations, "eps": eps}
    from shardlm.ops import sums_of_one_kernel

    kernel = functools.partial(sums_of_one_kernel.gradient, **how)
    return (jax.lax.platform_dependent(scores, given, cuda=kernel, default=functools.partial(gradient, **how)),)


sums_of_one.defvjp(_forward, _backward)
