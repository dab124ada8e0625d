"""Choosing the next token from logits."""

import jax
import jax.numpy as jnp

from shardlm.ops.attention import MASKED


def sample(logits: jax.Array, key: jax.Array, *, temperature: float, top_k: int, top_p: float) -> jax.Array:
    """One token per row. logits float32 [B, V] -> int32 [B].

    temperature 0 takes the most likely token; top_k keeps that many (0: all); top_p keeps the fewest most likely
    tokens whose probability reaches it (nucleus sampling, https://arxiv.org/abs/1904.09751). Ties at either edge are
    kept. top_k is applied first, as in Hugging Face transformers.
    """
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / temperature
    if top_k:
        smallest = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < smallest, MASKED, logits)
    if top_p < 1:
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probability = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability  # mass of the more likely tokens
        smallest = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, MASKED, logits)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
