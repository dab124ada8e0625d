"""Gradients of a stage's projections over devices that see other tokens: each sums its own, and they meet once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small import LLAMA, mesh_of, model_on, on_devices, packed_batch, relative_error
from small import init as init_of
from small_moe import DEEPSEEK

from shardlm.hlo.collectives import collectives
from shardlm.layers.own_sums import einsum_of_own, own_axes
from shardlm.layers.pipeline import stage_rules
from shardlm.layers.stack import kept
from shardlm.mesh import MeshSpec
from shardlm.rules import Rules
from shardlm.train.step import NextToken, StepConfig, gradients

FP32 = 1e-5  # only the order of sums differs, as in test_parallel_parity


def compiled(spec, config, remat="full", one_f_one_b=False):
    """(gradients and losses of one batch of eight rows, the compiled program)"""
    with jax.set_mesh(mesh_of(spec)):
        microbatches = 2 * spec.pipeline if spec.pipeline > 1 else 1
        model = model_on(spec, "zero1", config, microbatches=microbatches, remat=remat)
        step = StepConfig(accumulation=microbatches, objective=NextToken(1e-3), one_f_one_b=one_f_one_b)
        args = init_of(model), on_devices(packed_batch(8), model)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step)).lower(*args).compile()
        return jax.tree.map(np.asarray, run(*args)), run.as_text()


@pytest.fixture(scope="module")
def one_device():
    return {config: compiled(MeshSpec(), config)[0] for config in (LLAMA, DEEPSEEK)}


@pytest.mark.parametrize(
    "spec,config,how",
    [
        (MeshSpec(pipeline=2, context=2, tensor=2), LLAMA, {"remat": "dots"}),
        (MeshSpec(pipeline=2, context=2, data=2), LLAMA, {"one_f_one_b": True}),
        pytest.param(MeshSpec(pipeline=2, expert=2, context=2), DEEPSEEK, {"remat": "none"}, marks=pytest.mark.wide),
    ],
    ids=["circular", "1f1b", "experts"],
)
def test_no_tick_sums_a_projections_gradient_over_devices(spec, config, how, one_device):
    found, text = compiled(spec, config, **how)
    assert relative_error(found[1], one_device[config][1]) < FP32
    assert relative_error(found[0], one_device[config][0]) < FP32
    sums = [one for one in collectives(text, spec.sizes()) if one.kind == "all-reduce" and "context" in one.axes]
    in_ticks = [one for one in sums if one.depth and any(frame.function == "project" for frame in one.frames)]
    assert not in_ticks, in_ticks
    assert [one for one in sums if not one.depth]


def test_axes_are_those_over_which_weights_rest_whole():
    def own(preset, **sizes):
        return own_axes(stage_rules(Rules.make(preset, MeshSpec(pipeline=2, **sizes))))

    assert own("zero1", context=2, data=2) == own("zero2", context=2) == ("context",)
    assert own("replicated", context=2, expert=2) == ("expert", "context")
    assert own("zero3", context=2) == own("hybrid", context=2, data=2) == own("zero1", data=2, tensor=2) == ()


def test_dots_keeps_them_as_it_keeps_other_products():
    """Attention's products have batch dimensions too, and are made again."""
    spec = MeshSpec(context=2, expert=2)
    with jax.set_mesh(mesh_of(spec)):
        x = jax.ShapeDtypeStruct((4, 8, 6), jnp.float32, sharding=_named("expert", "context", None))
        w = jax.ShapeDtypeStruct((2, 2, 6, 5), jnp.float32, sharding=_named("expert", "context", None, None))
        made = jax.make_jaxpr(lambda x, w: einsum_of_own("btd,df->btf", x, w, 2, None))(x, w)
        q = jax.ShapeDtypeStruct((4, 8, 2, 6), jnp.float32, sharding=_named("expert", None, None, None))
        scores = jax.make_jaxpr(lambda q: jnp.einsum("btnh,bsnh->bnts", q, q))(q)
    assert made.out_avals[0].shape == (4, 8, 5)
    assert made.out_avals[0].sharding.spec == PartitionSpec("expert", "context", None)
    policy = kept("dots", None)
    for jaxpr, expected in ((made, True), (scores, False)):
        (dot,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        assert bool(policy(dot.primitive, *(v.aval for v in dot.invars), **dot.params)) is expected


def _named(*parts):
    return jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec(*parts))
