"""Attention over pages that takes queries, keys and values before their rotation (layers/paged.py,
ops/rotate_write.py), interpreted: blocks say on every mesh what they say without and leave the same pages, and what
such a kernel does not have is left to layers."""

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
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.page_layout import PageLayout
from shardlm.layers.paged import Paged
from shardlm.layers.param import Execution, Params
from shardlm.mesh import MeshSpec
from shardlm.ops import few_rows, paged_kernel, rotate_write
from shardlm.ops.rope import QueryGrowth, Rope
from shardlm.rules import Rules

ROWS, PAGE, PAGES = 4, 4, 14
ATTENTION = AttentionConfig(8, 2, 16)


def other(**how) -> AttentionConfig:
    return dataclasses.replace(ATTENTION, **how)


ROTATED = {
    "llama": ATTENTION,
    "qwen 3": other(qk_norm="head"),
    "biases, a window, sinks": other(bias=True, window=5, sinks=True),
    "a part, a gate": other(rope=Rope(dim=8), gate=True),
    "no rotation, chunks": other(rope=None, chunk=8),
}
LEFT = {
    "norms of all heads": other(qk_norm="all"),
    "norms behind": other(qk_norm="head", norm_rotated=True),
    "norms with a mean": other(qk_norm="head", norm=NormConfig("layer")),
    "norms without scales": other(qk_norm="head", norm=NormConfig(scaled=False)),
    "growing": other(query_growth=QueryGrowth(0.1, 4)),
    "clipped": other(clip=0.5),
    "norms of values": other(value_norm=True),
    "keys are values": other(keys_are_values=True),
    "narrow values": other(value_width=8),
    "scaled values": other(value_scale=0.5),
}
# Of layers that a kernel is no part of, what products make is what tests/test_fused.py has.
COMPUTED = ("norms of all heads", "keys are values", "narrow values")


@pytest.fixture
def interpreted(monkeypatch):
    """The names of the kernels that are called."""
    called = []

    def interpreting(module, name):
        kernel = getattr(module, name)

        def run(*args, **options):
            called.append(name)
            return kernel(*args, **options | {"interpret": True})

        monkeypatch.setattr(module, name, run)

    products = [(few_rows, name) for name in ("in_parts", "products", "gated")]
    for module, name in (*products, (rotate_write, "run"), (paged_kernel, "pallas")):
        interpreting(module, name)
    assert fused.few_rows is few_rows
    return called


def said(block: Block, x, execution: Execution, traced: bool = False, **how):
    """(what a block says of the last tokens of four rows, the pages): the last row is padding. `traced`: that the
    kernels are known which it calls is enough."""
    tokens, attention = x.shape[1], block.attention
    rng, act = np.random.default_rng(1), execution.rules.act
    entries = attention.cache_entries()
    pages = {
        name: jax.device_put(
            rng.normal(size=(2 * PAGES, PAGE, *entries["k"][0])).astype(np.float32),
            act.spec("pages", None, attention.kv_name, "head_dim"),
        )
        for name in "kv"
    }
    ends = np.array([12, 5, 9, 7])[:, None]
    positions = jnp.asarray(ends - tokens + np.arange(tokens), jnp.int32)
    table = jnp.asarray(1 + rng.permutation(PAGES - 1)[: ROWS * 3].reshape(ROWS, 3), jnp.int32)
    valid = jnp.broadcast_to(jnp.arange(ROWS)[:, None] < ROWS - 1, positions.shape)
    table, positions, valid = (jax.device_put(a, act.spec("batch", "whole_seq")) for a in (table, positions, valid))
    layout = PageLayout.whole(2, PAGES)

    @jax.jit
    def run(x, pages):
        ctx = Paged.make(table, valid, layout, execution, **how)
        return block(x, positions, ctx, pages, jnp.int32(1), execution)[:2]

    if traced:
        return jax.eval_shape(run, x, pages)
    out, pages = run(x, pages)
    return out[: ROWS - 1], pages


def block_and_x(config: AttentionConfig, rules: Rules, tokens: int = 1):
    block = Block(BlockConfig(config, MlpConfig(96)), 32, 1.0, NormConfig(), Params(nnx.Rngs(0), rules))
    x = np.random.default_rng(0).normal(size=(ROWS, tokens, 32)).astype(np.float32)
    return block, jax.device_put(x, rules.act.spec("batch", "seq", "embed"))


def same(one, other) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.sharding.spec == b.sharding.spec
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * float(jnp.abs(b).max()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(),
        pytest.param(MeshSpec(tensor=2), marks=pytest.mark.wide),
        pytest.param(MeshSpec(data=2, tensor=4), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_a_block_says_the_same(interpreted, name, spec):
    """Of four devices each has both kv heads whole."""
    rules = Rules.make("zero3", spec).for_serving(("heads", "kv_heads", "mlp"))
    plain, fast = (Execution(rules, paged_attention="pallas", fused_rows=rows) for rows in (0, ROWS * 3))
    with jax.set_mesh(mesh_of(spec)):
        for tokens in (1, 3) if name == "qwen 3" else (1,):
            block, x = block_and_x(ROTATED[name], rules, tokens)
            expected = said(block, x, plain)
            assert "run" not in interpreted
            same(said(block, x, fast), expected)
            assert "run" in interpreted
            interpreted.clear()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LEFT)
def test_what_the_kernel_does_not_have_is_left_to_layers(interpreted, name):
    rules = Rules.make("zero3", MeshSpec()).for_serving()
    with jax.set_mesh(mesh_of(MeshSpec())):
        block, x = block_and_x(LEFT[name], rules)
        plain, fast = (Execution(rules, paged_attention="pallas", fused_rows=rows) for rows in (0, ROWS))
        if name in COMPUTED:
            same(said(block, x, fast), said(block, x, plain))
        else:
            said(block, x, fast, traced=True)
        assert "in_parts" in interpreted and "run" not in interpreted


def test_so_are_rows_that_attend_to_what_is_at_hand_and_many_of_them(interpreted):
    rules = Rules.make("zero3", MeshSpec()).for_serving()
    with jax.set_mesh(mesh_of(MeshSpec())):
        block, x = block_and_x(ATTENTION, rules)
        said(block, x, Execution(rules, paged_attention="pallas", fused_rows=ROWS), traced=True, parts="xla")
        assert "in_parts" in interpreted
        said(block, x, Execution(rules, paged_attention="pallas", fused_rows=ROWS - 1), traced=True)
        said(block, x, Execution(rules, paged_attention="pallas", fused_rows=0), traced=True)
        assert "run" not in interpreted
