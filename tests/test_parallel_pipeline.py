"""Any pipeline, same numbers: loss and gradients of stages equal those of one device, whatever the schedule, the number
of layers and the other axes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from small import LLAMA, init, mesh_of, model_on, on_devices, packed_batch, relative_error, unlike

from shardlm.layers.pipeline import Schedule, to_layers, to_stages
from shardlm.layers.stack import kept_of_stage, rematerialised
from shardlm.layers.stage_weights import layer_of
from shardlm.mesh import MeshSpec
from shardlm.train.step import NextToken, StepConfig, gradients

# float32: only the order of sums differs, as in test_parallel_parity.
FP32 = 1e-5
SIX = dataclasses.replace(LLAMA, num_layers=6)
TIED_SIX = dataclasses.replace(SIX, tie_embeddings=True)


def loss_and_gradients(spec, preset="zero1", config=LLAMA, microbatches=4, rounds=1, one_f_one_b=False, rows=16):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, preset, config, microbatches=microbatches, rounds=rounds, remat="full")
        step = StepConfig(accumulation=microbatches, objective=NextToken(1e-3), one_f_one_b=one_f_one_b)
        run = jax.jit(lambda p, b: gradients(model, p, b, jnp.float32(1), step))
        grads, losses = run(init(model), on_devices(packed_batch(rows), model))
        return jax.tree.map(np.asarray, (grads, losses))


@functools.cache
def one_device(config=LLAMA, rows=16):
    return loss_and_gradients(MeshSpec(), "replicated", config, microbatches=1, rows=rows)


def assert_same(got, config=LLAMA, rows=16):
    grads, losses = one_device(config, rows)
    assert relative_error(got[1], losses) < FP32
    assert relative_error(got[0], grads) < FP32


@pytest.mark.sampled(2)
@pytest.mark.parametrize("preset", ["replicated", "zero1", "zero2", "zero3", "hybrid"])
def test_every_preset_with_layers_that_do_not_divide(preset):
    assert_same(loss_and_gradients(MeshSpec(data=2, pipeline=2, fsdp=2), preset))


@pytest.mark.sampled(2)
# All rounds with what splits weights and rows; stages alone, and key/value heads that are held whole, in one of them.
@pytest.mark.parametrize(
    "spec,rounds",
    [
        *((MeshSpec(pipeline=2, fsdp=2, tensor=2), rounds) for rounds in (1, 2, 3)),
        (MeshSpec(pipeline=2), 3),
        (MeshSpec(pipeline=2, tensor=4), 2),
    ],
    ids=str,
)
def test_rounds(spec, rounds):
    assert_same(loss_and_gradients(spec, "zero3", SIX, rounds=rounds), SIX)


def test_weights_are_not_kept_where_all_else_is():
    """They would be a copy of a stage's weights every tick."""
    weights = jnp.ones((6, 4, 5))

    def round_of(masters, x, first):
        def layer(carry, index):
            x, masters = carry
            own, masters = layer_of(weights, masters, first + index)
            return (jnp.tanh(x @ own @ own.T), masters), None

        return jax.lax.scan(rematerialised(layer, "none", weights), (x, masters), jnp.arange(3))[0][0]

    stage = jax.checkpoint(round_of, policy=kept_of_stage("none", weights))
    kept = [aval.shape for aval, _ in saved_residuals(lambda w, x, i: stage(w, x, i).sum(), weights, jnp.ones(4), 1)]
    assert (3, 4) in kept and (6, 4, 5) in kept and (3, 4, 5) not in kept


def test_a_program_that_is_read_from_the_compile_cache_gives_the_same():
    """XLA:CPU's did not (xla_options.py)."""
    for _ in range(3):
        assert_same(loss_and_gradients(MeshSpec(pipeline=2), "zero3", SIX, rounds=3), SIX)


def test_more_stages_than_layers_divide_into():
    assert_same(loss_and_gradients(MeshSpec(pipeline=4, tensor=2), "zero1", SIX, microbatches=8), SIX)
    assert_same(loss_and_gradients(MeshSpec(pipeline=4), "zero1", SIX, microbatches=16), SIX)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "preset,spec",
    unlike(["replicated", "zero3", "hybrid"], [MeshSpec(data=2, pipeline=2, fsdp=2), MeshSpec(pipeline=4, tensor=2)]),
    ids=str,
)
def test_one_forward_one_backward(spec, preset):
    config = LLAMA if spec.pipeline == 2 else TIED_SIX
    assert_same(loss_and_gradients(spec, preset, config, one_f_one_b=True), config)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec,preset,how",
    [
        (MeshSpec(pipeline=3, fsdp=2), "zero3", {"rounds": 2}),
        (MeshSpec(pipeline=3, data=2), "zero1", {"one_f_one_b": True}),
    ],
    ids=["circular", "1f1b"],
)
def test_an_embedding_that_does_not_divide_rests_whole_on_every_stage(spec, preset, how):
    got = loss_and_gradients(spec, preset, SIX, microbatches=3, rows=12, **how)
    assert_same(got, SIX, rows=12)


@pytest.mark.parametrize("stages,rounds", [(4, 1), (2, 2)])
def test_layers_are_dealt_to_places_as_cards_are(stages, rounds):
    places = stages * rounds
    with jax.set_mesh(mesh_of(MeshSpec(pipeline=stages))):
        for layers in range(places, 2 * places + 2):
            schedule = Schedule(layers, stages, rounds, stages)
            hands = [layers // places + (place < layers % places) for place in range(places)]
            numbers = 1.0 + np.arange(layers)
            slots = np.zeros((places, max(hands)))
            slots[np.arange(max(hands)) < np.array(hands)[:, None]] = numbers

            @jax.jit
            def dealt(a, schedule=schedule):
                staged = to_stages(a, schedule)
                return staged, to_layers(staged, schedule), jax.vmap(schedule.held)(jnp.arange(places))

            staged, back, held = dealt(numbers[:, None] * np.ones((1, 2)))
            expected = slots.reshape(rounds, stages, -1, 1) * np.ones(2)
            np.testing.assert_array_equal(staged, expected)
            np.testing.assert_array_equal(back[:, 0], numbers)
            np.testing.assert_array_equal(held, slots > 0)
            assert schedule.slots * places - schedule.short == sum(hands) == layers


def test_jobs_visit_each_layer_of_each_microbatch_once_and_in_order():
    for S, R, M in ((2, 1, 4), (4, 3, 8), (3, 2, 6)):
        schedule = Schedule(num_layers=24, stages=S, rounds=R, microbatches=M)
        ticks = jnp.arange(schedule.ticks)
        seen = {}
        for stage in range(S):
            rounds, microbatches, busy = (np.asarray(a) for a in jax.vmap(schedule.job, (0, None))(ticks, stage))
            for tick in np.flatnonzero(busy):
                seen[int(microbatches[tick]), int(rounds[tick]) * S + stage] = int(tick)
        assert set(seen) == {(m, place) for m in range(M) for place in range(S * R)}
        assert all(seen[m, place + 1] == seen[m, place] + 1 for m in range(M) for place in range(S * R - 1))


def test_bubble_fraction():
    assert Schedule(num_layers=8, stages=4, rounds=1, microbatches=8).bubble_fraction() == pytest.approx(3 / 11)
    assert Schedule(num_layers=8, stages=4, rounds=2, microbatches=8).bubble_fraction() == pytest.approx(3 / 19)
    assert Schedule(8, 4, 1, 8, both_ways=True).bubble_fraction() == pytest.approx(6 / 14)
    assert Schedule(num_layers=7, stages=4, rounds=1, microbatches=8).bubble_fraction() == pytest.approx(1 - 56 / 88)
    assert Schedule(num_layers=5, stages=4, rounds=1, microbatches=8).bubble_fraction() == pytest.approx(1 - 40 / 88)
