"""A decoder small enough to compile in seconds, and batches for it: shared by tests of the model and the step."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from shardlm.layers.packed import Packed
from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.models.transformer_config import TransformerConfig
from shardlm.rules import Rules
from shardlm.state import ModelDef, at_rest

# 8 heads and 2 kv heads: tensor=2 splits the kv heads, tensor=4 and 8 hold them whole.
LLAMA = LlamaConfig(
    vocab_size=64, embed_dim=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=8, mlp_dim=64, rope_theta=10_000.0
)
TIED = dataclasses.replace(LLAMA, tie_embeddings=True)


def packed_batch(rows: int = 16, length: int = 16, vocab: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tokens in rows of two documents and some padding, cut at a different place in every row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    cut = rng.integers(3, length - 3, rows)[:, None]
    end = length - rng.integers(0, 3, rows)[:, None]
    index = np.arange(length)[None]
    segments = np.where(index >= end, 0, 1 + (index >= cut)).astype(np.int32)
    positions = np.where(index >= cut, index - cut, index).astype(np.int32)
    mask = ((index != cut - 1) & (index < end)).astype(np.float32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments,
        "positions": positions,
        "loss_mask": mask,
    }


def model_on(spec: MeshSpec, preset: str = "zero3", config: LlamaConfig = LLAMA, **execution) -> ModelDef:
    """The model under a mesh that is already set."""
    shape = config.transformer()
    return ModelDef.make(shape, Execution(Rules.make(preset, spec).fitting(shape.widths()), **execution))


def unlike(presets: Sequence[str], specs: Sequence[MeshSpec]) -> list[tuple[str, MeshSpec]]:
    """Presets on meshes, without those whose tables differ from an earlier one's in axes of one device only: they make
    the same program."""
    found = {}
    for spec in specs:
        split = {axis for axis, size in spec.sizes().items() if size > 1}
        for preset in presets:
            rules = Rules.make(preset, spec)
            tables = (rules.rest, rules.use, rules.grads, rules.optimizer, rules.act)
            named = [
                (name, *(axis for axis in axes if axis in split)) for table in tables for name, axes in table.entries
            ]
            found.setdefault((spec, tuple(named)), (preset, spec))
    return list(found.values())


def logits_of(model: ModelDef, params, tokens: jax.Array) -> jax.Array:
    """[B, T, V] of rows of one document each, under a mesh that is set."""
    lm = model.model(params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    hidden, _, _ = lm(tokens, positions, Packed(jnp.ones_like(tokens), model.execution.rules))
    return lm.logits(hidden)


def init(model: ModelDef, seed: int = 0):
    """The weights of a seed, made on one device and put where the model's rules say: a mesh makes the same
    (test_parallel_parity.py, test_parallel_hybrid.py), but compiles for as long as a forward pass takes."""
    mesh = jax.sharding.get_mesh()
    shardings = jax.tree.map(lambda shape: at_rest(shape, mesh).sharding, model.shapes)
    return jax.device_put(whole_init(model.config, seed), shardings)


@functools.cache
def whole_init(config: TransformerConfig, seed: int):
    spec = MeshSpec()
    with jax.set_mesh(mesh_of(spec)):
        model = ModelDef.make(config, Execution(Rules.make("replicated", spec)))
        return jax.tree.map(np.asarray, init_on_mesh(model, seed))


def init_on_mesh(model: ModelDef, seed: int = 0):
    return jax.jit(lambda s: model.init(jax.random.key(s)))(seed)


def on_devices(batch: dict[str, np.ndarray], model: ModelDef) -> dict[str, jax.Array]:
    """The batch split as the model's rules say."""
    mesh = jax.sharding.get_mesh()
    sharding = NamedSharding(mesh, model.execution.rules.act.spec("batch", "whole_seq"))
    return {name: jax.device_put(jnp.asarray(a), sharding) for name, a in batch.items()}


def mesh_of(spec: MeshSpec):
    """A mesh over the first devices that the spec needs."""
    return spec.build(jax.devices()[: spec.size(*spec.sizes())])


def relative_error(tree, reference) -> float:
    """Largest over the leaves of max|a - b| / max|b|."""

    def error(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(error, tree, reference)))
