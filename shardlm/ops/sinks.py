"""Attention sinks: a score of each head, the same for every query, that takes weight and gives no value (GPT-OSS,
https://arxiv.org/abs/2508.10925, section 2.3; https://arxiv.org/abs/2309.17453). Kernels that know none leave out one
term of the softmax: with the log-partition they return it is put in behind them. Backwards, what they are given is the
result and the log-partition with sinks; then their weights exp(score - lse) are the right ones, and so is the shift of
each row by its result times its gradient, since a sink's value is 0."""

import jax
import jax.numpy as jnp


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, Hv] in its own dtype, log-partition float32 [B, T, N]) of attention without sinks -> the same with
    `sinks` [N]; None: as they are."""
    if sinks is None:
        return out, lse
    whole = jnp.logaddexp(lse, sinks.astype(jnp.float32))
    return (out * jnp.exp(lse - whole)[..., None]).astype(out.dtype), whole


def gradient_of_sinks(sinks: jax.Array | None, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> jax.Array | None:
    """[N] in the dtype of `sinks`, of what `with_sinks` returned; None without."""
    if sinks is None:
        return None
    shift = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    weight = jnp.exp(sinks.astype(jnp.float32) - lse)
    return -jnp.sum(weight * shift, axis=(0, 1)).astype(sinks.dtype)
