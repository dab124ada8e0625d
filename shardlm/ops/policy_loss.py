"""Losses of tokens that a model sampled and that were rewarded: the clipped gain of policy optimisation, and the
divergence from a reference."""

import jax
import jax.numpy as jnp


def policy_loss(change: jax.Array, advantages: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """The loss of each token, -min(r A, clip(r, 1 - low, 1 + high) A), and whether the clip took its gradient, both of
    the arguments' shape and float32 (PPO, https://arxiv.org/abs/1707.06347, equation 7; bounds apart:
    https://arxiv.org/abs/2503.14476, equation 10).

    Args:
      change: log of r, the token's log-probability less that with which it was sampled.
      advantages: A, of the reply it stands in.
    """
    ratio = jnp.exp(change)
    plain, bounded = ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages
    return -jnp.minimum(plain, bounded), (bounded < plain).astype(jnp.float32)


def divergence(logprobs: jax.Array, reference: jax.Array) -> jax.Array:
    """An estimate of how far the model is from the reference (KL) by each token that it sampled: exp(d) - d - 1 with d
    the reference's log-probability less the model's, never below 0 and right in the mean (GRPO,
    https://arxiv.org/abs/2402.03300, equation 4). Any shape."""
    d = reference - logprobs
    return jnp.exp(d) - d - 1
