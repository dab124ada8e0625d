"""An engine of random weights: how fast a model is served does not depend on what it says."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import tokenizers
from jax.sharding import Mesh
from tokenizers import models, pre_tokenizers

from shardlm.errors import ShardlmError
from shardlm.execution import execution_of
from shardlm.layers.lora import LoraConfig
from shardlm.models.transformer_config import TransformerConfig
from shardlm.opened import Opened
from shardlm.ops.weight_format import PUBLISHED, QUANTIZATIONS
from shardlm.serve.build import assemble
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.replicas import EngineGroup
from shardlm.serve.speculation.build import open_draft_model, wants_modules
from shardlm.serve.submeshes import of_replica, of_stage, submeshes
from shardlm.serving_rules import serving_rules
from shardlm.state import ModelDef
from shardlm.tokenizer import Tokenizer


def random_engine(shape: TransformerConfig, config: EngineConfig) -> Engine | EngineGroup:
    """For requests of config.max_model_len tokens. Raises ShardlmError for what does not fit."""
    submeshes(config.mesh)  # says where devices are too few
    one, length = of_replica(config.mesh), config.max_model_len
    mesh = one.build(jax.devices()[: one.size(*one.sizes())])
    device = mesh.devices.flat[0]
    dtype = config.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
    tokenizer = words(shape.vocab_size)
    if not wants_modules(config.speculative_config, shape, "this configuration"):
        shape = shape.without_mtp()
    with jax.set_mesh(mesh):
        held = config.quantization or "dtype"
        if held == PUBLISHED:
            raise ShardlmError(
                f"quantization={PUBLISHED} is of a checkpoint's own weights, and these are random: choose from "
                f"{', '.join(QUANTIZATIONS)}, or ask a server of the checkpoint (launch.bench serve --url)"
            )
        rules = serving_rules(shape, one, held)
        model = ModelDef.make(shape, execution_of(shape, rules, dtype, device, held, LoraConfig()))
        opened = Opened(model, random_weights(model, mesh), mesh, None, pathlib.Path())
    asked = config.speculative_config
    of_draft = dtype if asked and asked.method == "eagle3" else config.dtype  # a head is in the model's
    draft = open_draft_model(asked, shape, length, of_stage(one), of_draft, config.kv_cache_dtype)
    return assemble(opened, tokenizer, (), length, config, draft=draft)


def words(vocab_size: int) -> Tokenizer:
    """In which every token is a word, so that clients see each when it comes. A BPE of this vocabulary has no text for
    most of what random weights say, and bytes are parts of characters: all text came at the end."""
    backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend)


def random_weights(model: ModelDef, mesh: Mesh) -> Any:
    """As they are held: initial ones or, of a quantised model, integers and scales of about such sizes."""
    shapes = model.held_at_rest(mesh)
    if model.execution.weights == "dtype":
        make = lambda key: jax.tree.map(lambda a, s: a.astype(s.dtype), model.init(key), shapes)  # noqa: E731
        return jax.jit(make)(jax.random.key(0))

    def one(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, -127, 128, jnp.int32).astype(shape.dtype)
        return (0.02 * jax.random.normal(key, shape.shape)).astype(shape.dtype)

    leaves, tree = jax.tree.flatten(shapes)
    sharded = jax.tree.map(lambda s: s.sharding, shapes)
    make = lambda keys: jax.tree.unflatten(tree, [one(k, s) for k, s in zip(keys, leaves, strict=True)])  # noqa: E731
    return jax.jit(make, out_shardings=sharded)(jax.random.split(jax.random.key(0), len(leaves)))
