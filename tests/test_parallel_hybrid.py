"""Any mesh, same numbers, for products of axes: each pair of the six, in triples, on a model that has
latent attention, a dense layer and experts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import init, init_on_mesh, mesh_of, model_on, on_devices, packed_batch, relative_error, whole_init
from small_moe import DEEPSEEK

from shardlm.layers.packed import Packed
from shardlm.layers.stack import scan_blocks
from shardlm.mesh import AXES, MeshSpec
from shardlm.train.step import NextToken, StepConfig, gradients

# Six layers of experts behind a dense one: even in two places, in four they are 2, 2, 1 and 1.
CONFIG = dataclasses.replace(DEEPSEEK, num_layers=7)
FP32 = 1e-5  # only the order of sums differs, as in test_parallel_parity

# The fewest triples with every pair; stages with experts that are sent are below, with layers that do not divide, and
# the first by 1F1B.
MESHES = [
    (MeshSpec(pipeline=2, expert=2, tensor=2), "zero1"),
    (MeshSpec(data=2, pipeline=2, fsdp=2), "zero2"),
    (MeshSpec(pipeline=2, context=2, fsdp=2), "zero3"),
    (MeshSpec(data=2, context=2, expert=2), "hybrid"),
    (MeshSpec(data=2, context=2, tensor=2), "hybrid"),
    (MeshSpec(fsdp=2, expert=2, tensor=2), "zero3"),
]


def loss_and_gradients(spec, preset, one_f_one_b=False, rounds=1):
    with jax.set_mesh(mesh_of(spec)):
        microbatches = spec.pipeline
        model = model_on(spec, preset, CONFIG, microbatches=microbatches, rounds=rounds, remat="full")
        step = StepConfig(accumulation=microbatches, objective=NextToken(1e-3), one_f_one_b=one_f_one_b)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step))
        return jax.tree.map(np.asarray, run(init(model), on_devices(packed_batch(), model)))


@functools.cache
def one_device():
    return loss_and_gradients(MeshSpec(), "replicated")


def test_every_pair_is_there():
    def split(spec):
        return {axis for axis, size in spec.sizes().items() if size > 1}

    pairs = {frozenset(pair) for spec, _ in MESHES for pair in itertools.combinations(split(spec), 2)}
    assert pairs == {frozenset(pair) for pair in itertools.combinations(AXES, 2)}


@pytest.mark.parametrize(
    "spec",
    [
        MeshSpec(pipeline=2, expert=2, tensor=2),
        pytest.param(MeshSpec(data=2, fsdp=2, context=2), marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_initial_weights_are_bitwise_the_same(spec):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, "zero3", CONFIG)
        same = jax.tree.map(np.array_equal, init_on_mesh(model), whole_init(model.config, 0))
    assert all(jax.tree.leaves(same))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec,preset",
    [pytest.param(*mesh, marks=[pytest.mark.wide] * (i in (0, 1, 3, 5))) for i, mesh in enumerate(MESHES)],
    ids=str,
)
def test_products_of_axes(spec, preset):
    grads, losses = loss_and_gradients(spec, preset)
    assert relative_error(losses, one_device()[1]) < FP32
    assert relative_error(grads, one_device()[0]) < FP32


def test_layers_before_the_stages_and_experts_by_1f1b():
    grads, losses = loss_and_gradients(MeshSpec(pipeline=2, expert=2, tensor=2), "zero1", one_f_one_b=True)
    assert relative_error(losses, one_device()[1]) < FP32
    assert relative_error(grads, one_device()[0]) < FP32


@pytest.mark.wide
@pytest.mark.parametrize(
    "spec,rounds,one_f_one_b",
    [
        (MeshSpec(pipeline=2, expert=4), 2, False),
        pytest.param(MeshSpec(pipeline=4, expert=2), 1, True, marks=pytest.mark.wide),
    ],
    ids=["circular", "1f1b"],
)
def test_layers_of_experts_that_do_not_divide(spec, rounds, one_f_one_b):
    grads, losses = loss_and_gradients(spec, "zero1", one_f_one_b, rounds)
    assert relative_error(losses, one_device()[1]) < FP32
    assert relative_error(grads, one_device()[0]) < FP32


def test_experts_get_no_tokens_in_an_empty_slot():
    with jax.set_mesh(mesh_of(MeshSpec())):
        model = model_on(MeshSpec(), "replicated", CONFIG)
        lm = model.model(init(model))
        graph, state = nnx.split(lm.segments[1].blocks)
        state = jax.tree.map(lambda a: a[:2].at[1].set(0), state)
        x = jax.random.normal(jax.random.key(0), (2, 16, 32))
        batch = packed_batch(rows=2)
        ctx = dataclasses.replace(
            Packed.make(jnp.asarray(batch["segment_ids"]), jnp.asarray(batch["loss_mask"]), model.execution),
            held=jnp.array([True, False]),
        )
        positions = jnp.asarray(batch["positions"])
        both, _, aux = scan_blocks(graph, state, x, positions, ctx, None, 0, model.execution)
        first = jax.tree.map(lambda a: a[:1], state)
        ctx = dataclasses.replace(ctx, held=None)
        alone, _, expected = scan_blocks(graph, first, x, positions, ctx, None, 0, model.execution)
    np.testing.assert_array_equal(both, alone)
    np.testing.assert_array_equal(aux["expert_load"][0], expected["expert_load"][0])
    assert aux["expert_load"][0].sum() > 0 and not aux["expert_load"][1].any()
