"""A small model that has learnt a few texts by heart, and so have its modules that predict further tokens; and what
these draft, by hand: shared by tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from engines import CONFIG, TOKENIZER
from small import init, mesh_of, model_on
from small_moe import DEEPSEEK

from shardlm.layers.packed import Packed
from shardlm.mesh import MeshSpec
from shardlm.state import ModelDef
from shardlm.train.step import NextToken, StepConfig, gradients

TEXTS = ('["x", "y"], ', '{"name": "ab"}', "true né日🙂 ")
TWO = dataclasses.replace(DEEPSEEK, vocab_size=CONFIG.vocab_size, num_layers=1, dense_layers=0, mtp=2)
STEPS, LENGTH = 25, 32


def trained(config=TWO) -> dict:
    """Parameters after STEPS steps on rows of texts that repeat themselves."""
    rng = np.random.default_rng(0)
    texts = [np.array(TOKENIZER.encode(text * 20), np.int32) for text in TEXTS]
    with jax.set_mesh(mesh_of(MeshSpec())):
        model, tx = model_on(MeshSpec(), config=config, remat="none"), optax.adam(1e-2)
        objective = StepConfig(objective=NextToken(mtp_loss=1.0))

        @jax.jit
        def step(params, state, tokens):
            ones = jnp.ones_like(tokens[:, 1:])
            batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ones}
            batch |= {"positions": jnp.cumsum(ones, axis=1) - 1, "loss_mask": ones.astype(jnp.float32)}
            grads, _ = gradients(model, params, batch, jnp.float32(1), objective)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = init(model)
        state = jax.jit(tx.init)(params)
        for _ in range(STEPS):
            rows = [text[rng.integers(0, len(text) - LENGTH) :][: LENGTH + 1] for text in texts * 4]
            params, state = step(params, state, jnp.asarray(np.stack(rows)))
    return params


def drafted(model: ModelDef, params, text: jax.Array, last: jax.Array, count: int) -> jax.Array:
    """int32 [count], the most likely tokens after position `last` of text int32 [1, T], of which later tokens are not
    looked at: modules run over the whole row, anew for each draft; inside jit."""
    lm, modules = model.model(params), model.config.mtp.depth
    positions = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
    ctx = Packed(jnp.ones_like(text), model.execution.rules)
    below, _, _ = lm(text, positions, ctx)
    made, drafts = below, []
    for i in range(count):
        module, again = min(i, modules - 1), max(i - modules + 1, 0)
        at = last - 1 + again
        # The last module once more: beyond the last position of what it takes stands what it made there.
        below = below.at[:, at].set(made[:, at - 1]) if again else made
        made, _ = lm.predict_next(below, jnp.roll(text, -1 - module, axis=1), positions, ctx, depth=module)
        drafts.append(jnp.argmax(lm.logits_of_next(made, module)[0, at]).astype(jnp.int32))
        text = text.at[0, last + 1 + i].set(drafts[-1])
    return jnp.stack(drafts)
