"""Projections of few tokens by the kernels that take norms and gates in (layers/fused.py), interpreted: blocks say on
every mesh what they say without, and who has no such kernel is left as it was."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import mesh_of

from shardlm.layers import fused
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import Block, BlockConfig
from shardlm.layers.lora import LoraConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.param import Execution, Params
from shardlm.mesh import MeshSpec
from shardlm.ops import few_rows
from shardlm.rules import Rules

ATTENTION = AttentionConfig(8, 4, 16)
LLAMA = BlockConfig(ATTENTION, MlpConfig(192))
BLOCKS = {
    "llama": LLAMA,
    "gelu, qk norm, bias": BlockConfig(
        dataclasses.replace(ATTENTION, qk_norm="head", bias=True, out_bias=True), MlpConfig(192, "gelu_tanh")
    ),
    "two norms each": dataclasses.replace(LLAMA, norms="both"),
    "norms behind": dataclasses.replace(LLAMA, norms="post"),
    "parallel": dataclasses.replace(LLAMA, parallel=True),
    "a gate, and a plain MLP with biases": BlockConfig(
        dataclasses.replace(ATTENTION, gate=True), MlpConfig(192, "relu2", gated=False, bias=True)
    ),
    "clamped": BlockConfig(ATTENTION, MlpConfig(192, "clamped", bias=True)),
    "experts": BlockConfig(ATTENTION, MoeConfig(4, 2, 64)),
}


class _Own:
    """A context in which a token attends to itself: its values, for each query head."""

    absorbs = True
    real = jnp.ones((3, 1), bool)
    weights = seen = turns = until = sines = None

    def rotates(self, pages, kv_name):
        return False

    def attend(self, q, k, v, positions, pages, layer, **options):
        kv_heads = v.shape[2]
        spec = jax.typeof(q).sharding.spec
        heads = jnp.arange(q.shape[2]) * kv_heads // q.shape[2]
        whole = jax.reshard(v, jax.sharding.PartitionSpec())
        return q + jax.reshard(k.mean() + jnp.take(whole, heads, axis=2), spec), pages


@pytest.fixture
def interpreted(monkeypatch):
    """The names of the kernels that are called."""
    called = []

    def interpreting(name):
        kernel = getattr(few_rows, name)

        def run(*args, **options):
            called.append(name)
            return kernel(*args, **options | {"interpret": True})

        return run

    for name in ("products", "gated"):
        monkeypatch.setattr(fused.few_rows, name, interpreting(name))
    return called


def said(block: Block, x, execution: Execution):
    return jax.jit(as_function(block, execution))(x)


def as_function(block: Block, execution: Execution):
    positions = jnp.arange(3, dtype=jnp.int32)[:, None]
    return lambda x: block(x, positions, _Own(), {}, 0, execution)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(
    "spec",
    [MeshSpec(), pytest.param(MeshSpec(tensor=4), marks=pytest.mark.wide), MeshSpec(tensor=2, expert=2)],
    ids=str,
)
def test_a_block_says_the_same(interpreted, name, spec):
    rules = Rules.make("zero3", spec).for_serving(("heads", "kv_heads", "mlp"))
    norm = NormConfig(offset=1.0 if name == "two norms each" else 0.0)
    with jax.set_mesh(mesh_of(spec)):
        block = Block(BLOCKS[name], 64, 1.0, norm, Params(nnx.Rngs(0), rules))
        x = np.random.default_rng(0).normal(size=(3, 1, 64)).astype(np.float32)
        x = jax.device_put(x, rules.act.spec("batch", "seq", "embed"))
        plain = said(block, x, Execution(rules))
        assert not interpreted
        made = said(block, x, Execution(rules, fused_rows=3))
        expected = {"products"} | ({"gated"} if name in ("llama", "gelu, qk norm, bias", "two norms each") else set())
        assert expected <= set(interpreted)
        assert plain.sharding.spec == made.sharding.spec
        np.testing.assert_allclose(made, plain, rtol=1e-4, atol=2e-5 * float(jnp.abs(plain).max()))
        interpreted.clear()
        jax.eval_shape(as_function(block, Execution(rules, fused_rows=2)), x)  # fewer than there are
        assert not interpreted


OTHERS = {"adapters": {"lora": LoraConfig(4).of_model(False)}, "int8": {"weights": "int8"}, "cpu": {"made_first": True}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", OTHERS.values(), ids=OTHERS)
def test_weights_with_more_to_them_are_left_to_others(interpreted, how):
    rules = Rules.make("zero3", MeshSpec()).for_serving()
    with jax.set_mesh(mesh_of(MeshSpec())):
        block = Block(LLAMA, 64, 1.0, NormConfig(), Params(nnx.Rngs(0), rules, **how))
        x = jnp.ones((3, 1, 64), out_sharding=rules.act.spec("batch", "seq", "embed"))
        plain = said(block, x, Execution(rules, **how))
        np.testing.assert_array_equal(said(block, x, Execution(rules, **how, fused_rows=64)), plain)
        assert not interpreted
