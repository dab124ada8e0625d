"""A law: on every mesh, under every rule table and precision, loss and gradients equal those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from small import (
    LLAMA,
    TIED,
    init,
    init_on_mesh,
    logits_of,
    mesh_of,
    model_on,
    on_devices,
    packed_batch,
    relative_error,
    unlike,
    whole_init,
)

from shardlm.mesh import MeshSpec
from shardlm.state import at_rest
from shardlm.train.step import NextToken, StepConfig, gradients

# Float32 sums in another order differ by about 1e-6 of the largest gradient (measured: 1.0e-6 to 1.4e-6).
FP32 = 1e-5
# One rounding of a 16-bit type is 2**-8 (bfloat16) or 2**-11 (float16). Gradients are sums of rounded products, reduced
# across devices after rounding, so meshes differ by a few roundings (measured: up to 0.014 and 0.0021).
TOLERANCE = {"float32": FP32, "bfloat16": 0.05, "float16": 0.01}
PRESETS = ("replicated", "zero1", "zero2", "zero3", "hybrid")
MESHES = (
    MeshSpec(data=8),
    MeshSpec(fsdp=8),
    MeshSpec(tensor=8),
    MeshSpec(data=2, fsdp=2, tensor=2),
    MeshSpec(fsdp=2, tensor=4),
)


def loss_and_gradients(spec, preset, config=LLAMA, dtype="float32", accumulation=1, remat="full", scale=1.0):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, preset, config, dtype=jnp.dtype(dtype), remat=remat)
        step = StepConfig(accumulation=accumulation, objective=NextToken(1e-3))
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(scale), step))
        grads, losses = run(init(model), on_devices(packed_batch(), model))
        return jax.tree.map(np.asarray, (grads, losses))


@functools.cache
def one_device(dtype="float32", tied=False, scale=1.0):
    return loss_and_gradients(MeshSpec(), "replicated", TIED if tied else LLAMA, dtype, remat="none", scale=scale)


@pytest.mark.parametrize("preset,spec", unlike(PRESETS, MESHES), ids=str)
def test_every_preset_on_every_mesh(preset, spec):
    grads, losses = loss_and_gradients(spec, preset)
    assert relative_error(losses, one_device()[1]) < FP32
    assert relative_error(grads, one_device()[0]) < FP32


@pytest.mark.parametrize("dtype,scale", [("bfloat16", 1.0), ("float16", 1024.0)])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_in_16_bits(preset, dtype, scale):
    grads, losses = loss_and_gradients(MeshSpec(data=2, fsdp=2, tensor=2), preset, dtype=dtype, scale=scale)
    assert relative_error(losses, one_device(dtype, scale=scale)[1]) < TOLERANCE[dtype]
    assert relative_error(grads, one_device(dtype, scale=scale)[0]) < TOLERANCE[dtype]


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_accumulation_and_tied_embeddings(preset):
    grads, losses = loss_and_gradients(MeshSpec(data=2, fsdp=2, tensor=2), preset, TIED, accumulation=4)
    assert relative_error(losses, one_device(tied=True)[1]) < FP32
    assert relative_error(grads, one_device(tied=True)[0]) < FP32


@pytest.mark.parametrize("remat", ["none", "dots", "names", "offload"])
def test_remat_changes_memory_only(remat):
    grads, losses = loss_and_gradients(MeshSpec(fsdp=2, tensor=4), "zero3", remat=remat)
    assert relative_error(losses, one_device()[1]) < FP32
    assert relative_error(grads, one_device()[0]) < FP32


@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_is_made_again_waits_for_the_gradients_and_weights_do_not(remat):
    """XLA gathers weights a layer ahead, and would make activations ahead, and again, where these are gathered."""
    with jax.set_mesh(mesh_of(MeshSpec(fsdp=8))):
        model = model_on(MeshSpec(fsdp=8), "zero3", remat=remat)
        params, batch = init(model), on_devices(packed_batch(), model)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), StepConfig(objective=NextToken())))
        text = run.lower(params, batch).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    stream, weight = (f"x{LLAMA.embed_dim}xf32", f"tensor<{LLAMA.embed_dim}x{LLAMA.mlp_dim}xf32")
    bound = [line for line in barriers if line.count(stream) >= 2]
    assert bool(bound) == (remat == "full"), barriers
    assert not any(weight in line for line in bound)


def test_no_policy_keeps_weights_in_use():
    """Cast to the compute type and gathered, they are as large as the model: the backward pass makes them again."""
    spec = MeshSpec(fsdp=2, tensor=4)
    mesh = mesh_of(spec)
    with jax.set_mesh(mesh):
        model = model_on(spec, "zero3", dtype=jnp.dtype("bfloat16"), remat="none")
        params = jax.tree.map(lambda a: at_rest(a, mesh), model.shapes)
        rows = NamedSharding(mesh, model.execution.rules.act.spec("batch", "whole_seq"))
        tokens = jax.ShapeDtypeStruct((16, 16), jnp.int32, sharding=rows)
        kept = jax.eval_shape(lambda p, t: jax.vjp(lambda p: logits_of(model, p, t), p)[1], params, tokens)
    layers = {a.shape for a in jax.tree.leaves(params["segments"]) if a.ndim > 2}
    found = {(a.shape, a.dtype) for a in jax.tree.leaves(kept) if a.shape in layers}
    assert found == {(shape, jnp.dtype("float32")) for shape in layers}  # the weights as they rest
    # Not so activations, of which the MLP's are [layers, rows, length, F].
    assert any(a.shape == (3, 16, 16, 64) and a.dtype == jnp.bfloat16 for a in jax.tree.leaves(kept))


@pytest.mark.parametrize("spec", MESHES, ids=str)
def test_initial_weights_are_bitwise_the_same(spec):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, "zero3")
        same = jax.tree.map(np.array_equal, init_on_mesh(model), whole_init(model.config, 0))
    assert all(jax.tree.leaves(same))
