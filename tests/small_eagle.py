"""Small heads that draft by a model's streams (EAGLE-3), and what they draft by hand: shared by tests."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from small import mesh_of

from shardlm import hf_files, weights
from shardlm.layers.eagle import EagleConfig
from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.layers.stack import Segment
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.models.transformer_config import TransformerConfig
from shardlm.rules import Rules
from shardlm.state import ModelDef

STREAMS = (1, 2, 4)  # behind so many layers of a model of four


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
        stream, _, _ = lm.run(x, positions, ctx, None)
        finished = lm.finish(stream)
        made = finished if lm.eagle.config.goes_on == "normed" else stream
        found.append(lm.eagle.of_all(lm.logits(finished)[:, at], head.execution))
        drafts.append(jnp.argmax(found[-1], axis=-1).astype(jnp.int32))
        text = text.at[:, last + 1 + i].set(drafts[-1])
        x = x.at[:, at + 1].set(made[:, at])
    return jnp.stack(found, 1), jnp.stack(drafts, 1)


def head_for(shape: TransformerConfig, proposed: int) -> TransformerConfig:
    """A head of one layer for a model of this shape, of which it reads three streams."""
    [first, *_] = shape.blocks()
    block = dataclasses.replace(first, attention=dataclasses.replace(first.attention, beside="stream"))
    own = EagleConfig(len(STREAMS) * shape.embed_dim, proposed)
    return dataclasses.replace(shape, segments=(Segment((block,), 1),), eagle=own, tie_embeddings=False, mtp=None)


def trained(model: ModelDef, head: ModelDef, proposed: np.ndarray, texts: list[np.ndarray], length: int, steps: int):
    """(parameters of a model whose layers are apart, and of its head, which shares the embedding), on the host, after
    some steps on rows of texts: the model by each next token, the head by the one after that, of the model's streams
    and then once more of its own. `proposed`: int32 [V], the place of each token."""
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh_of(MeshSpec())):
        key = jax.random.key(0)
        both = jax.jit(lambda: (model.init(key), head.init(key)))()
        both[1]["eagle"]["proposed"] = jnp.asarray(proposed)
        both[1]["embedding"] = jnp.zeros(0)  # the model's
        tx = optax.adam(1e-2)

        def loss_of(learnt, tokens):
            models, own = learnt
            own = {**own, "embedding": jax.lax.stop_gradient(models["embedding"])}
            own["eagle"] = {**own["eagle"], "proposed": jnp.asarray(proposed)}
            lm, drafts = model.model(models), head.model(own)
            positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens[:, :-2].shape)
            text, ctx = tokens[:, :-2], Packed(jnp.ones_like(tokens[:, :-2]), model.execution.rules)
            hidden, _, aux = lm(text, positions, ctx)
            losses = [of(lm.logits(hidden), tokens[:, 1:-1])]
            ctx = dataclasses.replace(ctx, inputs=drafts.embed(tokens[:, 1:-1], positions)[None])
            x = drafts.eagle(jax.lax.stop_gradient(aux["handed out"]), head.execution)
            for _ in range(2):
                x, _, _ = drafts.run(x, positions, ctx, None)
                losses.append(of(drafts.eagle.of_all(drafts.logits(drafts.finish(x)), head.execution), tokens[:, 2:]))
                x = jnp.roll(x, 1, axis=1)
            return sum(losses)

        def of(logits, targets):
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        @jax.jit
        def step(learnt, state, tokens):
            updates, state = tx.update(jax.grad(loss_of, allow_int=True)(learnt, tokens), state, learnt)
            return optax.apply_updates(learnt, updates), state

        kept = both[1]["eagle"].pop("proposed")
        state = jax.jit(tx.init)(both)
        for _ in range(steps):
            rows = [text[rng.integers(0, len(text) - length - 1) :][: length + 2] for text in texts * 4]
            both, state = step(both, state, jnp.asarray(np.stack(rows)))
    models, own = jax.tree.map(np.asarray, both)
    own["eagle"]["proposed"], own["embedding"] = np.asarray(kept), models["embedding"]
    return models, own


def folder_of_head(path: pathlib.Path, shape: TransformerConfig, params) -> pathlib.Path:
    """As SpecForge writes it, without an embedding."""
    with jax.set_mesh(mesh_of(MeshSpec())):
        config = ModelDef.make(shape, Execution(Rules.make("zero3", MeshSpec()))).config
    [block] = shape.blocks()
    own, place = block.attention, np.asarray(params["eagle"]["proposed"])
    rest = {**params, "eagle": {"fc": params["eagle"]["fc"]}}
    del rest["embedding"]
    named = functools.partial(registry.names, {"model_type": "eagle3"}, config)
    tensors = list(weights.planned(config, rest, named, np.dtype("float32")))
    offsets = np.argsort(np.where(place < 0, len(place), place), kind="stable")[: place.max() + 1]
    offsets = (offsets - np.arange(len(offsets))).astype(np.int64)
    tensors.append(hf_files.Planned("d2t", offsets.dtype, offsets.shape, lambda: offsets))
    said = {
        "model_type": "llama",
        "hidden_size": shape.embed_dim,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": len(offsets),
        "num_hidden_layers": 1,
        "num_attention_heads": own.num_heads,
        "num_key_value_heads": own.num_kv_heads,
        "head_dim": own.head_dim,
        "intermediate_size": block.mlp.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm.eps,
        "rope_theta": own.rope.theta,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [place - 1 for place in STREAMS]},
    }
    hf_files.write_folder(path, tensors, said)
    return path
