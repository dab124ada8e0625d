"""What modules that predict further tokens make of whole texts: shared by their tests."""

import jax.numpy as jnp

from shardlm.layers.packed import Packed


def further_logits(model, params, tokens):
    """Logits of the model and of each of its modules, float32 [B, T - k, V], of rows int32 [B, T] that are one text
    each; inside jit."""
    lm, length = model.model(params), tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
    hidden, _, _ = lm(tokens, positions, Packed(jnp.ones_like(tokens), model.execution.rules))
    found = [lm.logits(hidden)]
    for depth in range(model.config.mtp.depth):
        length -= 1
        ctx = Packed(jnp.ones((len(tokens), length), jnp.int32), model.execution.rules)
        hidden, _ = lm.predict_next(hidden[:, :length], tokens[:, depth + 1 :], positions[:, :length], ctx, depth=depth)
        found.append(lm.logits_of_next(hidden, depth))
    return found
