"""Small heads that draft by a model's streams (EAGLE-3), and what they draft by hand: shared by tests."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.layers.packed import Packed
from shardlm.state import ModelDef


def streams_of(model: ModelDef, params, text: jax.Array) -> jax.Array:
    """What a model that hands its streams out says of text int32 [B, T]; inside jit."""
    positions = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32), text.shape)
    ctx = Packed(jnp.ones_like(text), model.execution.rules)
    _, _, aux = model.model(params)(text, positions, ctx)
    return aux["handed out"]


def drafted(head: ModelDef, params, streams: jax.Array, text: jax.Array, last: jax.Array, count: int):
    """(logits [B, count, V] of all the model's tokens, int32 [B, count] the likeliest) after position `last` of text
    int32 [B, T], of which later tokens are not looked at, nor the streams [B, T, R] from there on: the head run over
    the whole rows, anew for each draft; inside jit."""
    lm = head.model(params)
    positions = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32), text.shape)
    x, found, drafts = lm.eagle(streams, head.execution), [], []
    for i in range(count):
        ctx, at = Packed(jnp.ones_like(text), head.execution.rules), last - 1 + i
        ctx = dataclasses.replace(ctx, inputs=lm.embed(jnp.roll(text, -1, axis=1), positions)[None])
        made, _, _ = lm.run(x, positions, ctx, None)
        found.append(lm.eagle.of_all(lm.logits(lm.finish(made))[:, at], head.execution))
        drafts.append(jnp.argmax(found[-1], axis=-1).astype(jnp.int32))
        text = text.at[:, last + 1 + i].set(drafts[-1])
        x = x.at[:, at + 1].set(made[:, at])
    return jnp.stack(found, 1), jnp.stack(drafts, 1)
