"""A stage's weights over the ticks: held in the type that layers compute in, gradients summed in float32, in place."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params
from small import LLAMA, mesh_of, model_on, on_devices, packed_batch

from shardlm.layers.stage_weights import cast_ahead, layer_of
from shardlm.mesh import MeshSpec
from shardlm.train.step import NextToken, StepConfig, gradients

PICKS = jnp.array([0, 2, 2, 1, 0])


def test_gradients_are_those_of_slices_of_the_weights():
    weights = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 3)), jnp.float32)}

    def through(masters):
        def tick(carry, at):
            x, masters = carry
            own, masters = layer_of(weights, masters, at)
            return (jnp.tanh(x @ own["w"]), masters), None

        return jax.lax.scan(tick, (jnp.ones((2, 3)), masters), PICKS)[0][0].sum()

    def sliced(weights):
        return jax.lax.scan(lambda x, at: (jnp.tanh(x @ weights["w"][at]), None), jnp.ones((2, 3)), PICKS)[0].sum()

    got, expected = jax.grad(through)(weights)["w"], jax.grad(sliced)(weights)["w"]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert np.abs(expected[:3]).min() > 0 and not expected[3].any()


def test_gradients_of_16_bits_are_summed_in_float32():
    """bfloat16 has 8 bits: from 256 on a sum of ones stands still."""
    held = jnp.ones((2, 3), jnp.bfloat16)

    def through(masters):
        def tick(masters, at):
            own, masters = layer_of(held, masters, at)
            return masters, own.sum()

        return jax.lax.scan(tick, masters, jnp.zeros(1000, jnp.int32))[1].astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(through)(jnp.ones((2, 3))), [[1000] * 3, [0] * 3])


def test_layers_hold_their_matrices_in_the_type_they_compute_in_and_norms_and_router_as_they_rest():
    params = {"wq": (2, 4, 4), "scale": (2, 4), "router": (2, 4, 4)}
    params = {name: jnp.ones(shape) for name, shape in params.items()} | {"packed": jnp.ones((2, 4, 4), jnp.uint8)}
    types = {name: a.dtype.name for name, a in cast_ahead(params, jnp.bfloat16).items()}
    assert types == {"wq": "bfloat16", "scale": "float32", "router": "float32", "packed": "uint8"}


def test_no_tick_adds_the_gradients_of_all_rounds():
    """Nor casts a stage's weights: what a tick does to them, it does to one layer's."""
    spec, rounds = MeshSpec(pipeline=2), 2
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, "zero1", LLAMA, microbatches=4, rounds=rounds, remat="full", dtype=jnp.bfloat16)
        step = StepConfig(accumulation=4, objective=NextToken())
        params = jax.eval_shape(model.init, jax.random.key(0))
        jaxpr = jax.make_jaxpr(lambda p, b: gradients(model, p, b, jnp.float32(1), step))(
            params, on_devices(packed_batch(16), model)
        )
    shape = LLAMA.embed_dim, LLAMA.mlp_dim
    found = [(name, a.dtype.name, a.shape[:-2]) for name, a in _in_loops(jaxpr.jaxpr, False) if a.shape[-2:] == shape]
    assert ("add", "float32", ()) in found and ("dot_general", "bfloat16", ()) in found
    assert not [one for one in found if one[0] in ("add_any", "add", "pad", "convert_element_type") and one[2]], found


def _in_loops(jaxpr, inside):
    """(primitive, type of a result) of all that a jaxpr's loops do."""
    for eqn in jaxpr.eqns:
        if inside:
            yield from ((eqn.primitive.name, out.aval) for out in eqn.outvars if hasattr(out.aval, "shape"))
        for inner in jaxprs_in_params(eqn.params):
            yield from _in_loops(getattr(inner, "jaxpr", inner), inside or eqn.primitive.name == "scan")
