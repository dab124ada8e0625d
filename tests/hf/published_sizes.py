"""Options as publishers write them, and the size of the model that they describe."""

import json
import math

import jax
import pytest
from small import mesh_of

from shardlm.layers.param import Execution
from shardlm.mesh import MeshSpec
from shardlm.models import registry
from shardlm.rules import Rules
from shardlm.state import ModelDef


def common(layers, hidden, heads, kv, mlp, vocab, **more):
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
        "intermediate_size": mlp, "vocab_size": vocab, "rms_norm_eps": 1e-6, "hidden_act": "silu", "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
        "use_cache": True, "attention_dropout": 0.0, "max_position_embeddings": 32768, "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    } | more  # fmt: skip


YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}


def parameters(config: dict, further: bool = False) -> int:
    """Of the model of a config.json; `further`: with the modules that predict further tokens."""
    shape = registry.transformer(json.loads(json.dumps(config)))
    with jax.set_mesh(mesh_of(MeshSpec())):
        execution = Execution(Rules.make("replicated", MeshSpec()))
        model = ModelDef.make(shape if further else shape.without_mtp(), execution)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.shapes))


def check_size(config: dict, billions: float) -> None:
    """Raises AssertionError where the model has not about so many parameters, which publishers round."""
    found = parameters(config)
    assert found == pytest.approx(billions * 1e9, rel=0.02), f"{found:,} parameters, stated {billions} billions"
