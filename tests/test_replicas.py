"""Replicas that stand apart: their own exchange equals the ordinary one, uneven shares give the even result, and what
does not fit together is refused."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from replica_runs import ALL, CONFIG, changed, make, train
from small import init, mesh_of, model_on, on_devices, packed_batch, relative_error

from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.rules import Rules
from shardlm.state import ModelDef
from shardlm.train.batches import PADDING, local_rows, slots, to_devices
from shardlm.train.check import check_batch
from shardlm.train.compression import Exchange
from shardlm.train.config import LocalSgdConfig, TrainConfig
from shardlm.train.replicas import begin_exchange, check_replicas, exchanged_gradients
from shardlm.train.step import NextToken, StepConfig, gradients

# Each mesh, and both presets where all ways to split are.
MESHES = [
    (ALL, "hybrid"),
    (ALL, "zero1"),
    (MeshSpec(data=4, tensor=2), "zero1"),
    (MeshSpec(data=2, fsdp=4), "hybrid"),
    (MeshSpec(data=2, pipeline=2, fsdp=2), "zero1"),
]
STEP = StepConfig(accumulation=2, objective=NextToken(1e-3))
SAME = 3e-6  # float32 sums in another order (measured: up to 1.1e-6)


@functools.cache
def ordinary():
    """Gradients and losses of one device, which those of any mesh equal (test_parallel_parity.py)."""
    spec = MeshSpec()
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, "replicated", microbatches=2)
        run = jax.jit(lambda p, b: gradients(model, p, b, jax.numpy.float32(1), STEP))
        return jax.tree.map(np.asarray, run(init(model), on_devices(packed_batch(), model)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec,preset", MESHES, ids=str)
def test_the_exchange_of_exact_sums_is_the_ordinary_step(spec, preset):
    with jax.set_mesh(mesh_of(spec)):
        model = model_on(spec, preset, microbatches=2)
        inside = dataclasses.replace(model.execution, rules=model.execution.rules.inside("data"))
        replica = ModelDef.make(model.config, inside)
        exchange = Exchange("none", 1, model.names)
        apart = exchanged_gradients(model, replica, STEP, (2,) * spec.data, exchange)
        params, batch = init(model), on_devices(packed_batch(), model)
        scale = jax.numpy.float32(8)
        found = jax.jit(lambda p, b: apart(p, b, scale, begin_exchange(replica, exchange, p))[:2])(params, batch)
        assert relative_error(found, ordinary()) < SAME


@functools.cache
def even(preset: str = "hybrid"):
    state, metrics = train(make(changed(rules=preset)), 4)
    return jax.tree.map(np.asarray, state.params), metrics


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec,shares,preset",
    [
        (ALL, (1, 3), "hybrid"),
        pytest.param(ALL, (3, 1), "zero1", marks=pytest.mark.wide),
        (MeshSpec(data=4, fsdp=2), (1, 2, 1, 4), "replicated"),
        pytest.param(MeshSpec(data=8), (1, 1, 1, 5, 2, 2, 1, 3), "hybrid", marks=pytest.mark.wide),
        pytest.param(MeshSpec(data=2, tensor=2), (2, 2), "hybrid", marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_uneven_shares_give_the_even_result(spec, shares, preset):
    state, metrics = train(make(changed(shares=shares, rules=preset), spec), 4)
    params, expected = even()
    for name in ("loss", "grad_norm", "tokens", "attention_pairs"):
        np.testing.assert_allclose([m[name] for m in metrics], [m[name] for m in expected], rtol=1e-5)
    # Adam divides by small second moments, which enlarges rounding in four steps (measured: up to 1.5e-5).
    assert relative_error(state.params, params) < 1e-3


@pytest.mark.wide
def test_uneven_shares_with_compression_follow_the_even_ones():
    _, metrics = train(make(changed(shares=(1, 3), compression="int8")), 4)
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in even()[1]], atol=5e-3)


def test_every_row_has_one_slot_and_microbatches_of_a_share_come_first():
    found = slots((1, 3), 8)
    assert found == (0, PADDING, PADDING, 1, PADDING, PADDING, 2, 3, 4, 5, 6, 7)
    assert slots((2, 2), 8) == tuple(range(8))
    for counts, rows in [((1, 2, 1, 4), 16), ((5, 1), 12)]:
        found = slots(counts, rows)
        assert sorted(set(found) - {PADDING}) == list(range(rows)) and len(found) == len(counts) * max(counts) * (
            rows // sum(counts)
        )
        of_replica = np.array(found).reshape(len(counts), -1, max(counts))  # [replica, row in microbatch, microbatch]
        for share, microbatches in zip(counts, of_replica, strict=True):
            assert (microbatches[:, :share] != PADDING).all() and (microbatches[:, share:] == PADDING).all()


def test_rows_reach_their_slots_and_the_rest_is_zero():
    mesh, places = mesh_of(MeshSpec(data=2, fsdp=2)), slots((1, 3), 8)
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    assert local_rows(sharding, places, 5) == tuple(range(8))
    rows = np.arange(40).reshape(8, 5) + 1
    found = np.asarray(to_devices({"tokens": rows}, tuple(range(8)), sharding, places)["tokens"])
    for place, row in enumerate(places):
        assert (found[place] == (0 if row == PADDING else rows[row])).all()


@pytest.mark.parametrize("compression", ["int8", pytest.param("powersgd", marks=pytest.mark.wide)])
def test_what_is_not_yet_sent_survives_a_checkpoint(compression, tmp_path):
    program = make(changed(compression=compression))
    step = program.compile_step({})
    half, _ = train(program, 3, step=step)
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(3, half, {}, {})
        checkpoints.wait()
    through, expected = train(program, 2, state=half, first=4, step=step)
    with jax.set_mesh(program.mesh):
        restored = Checkpoints(tmp_path).restore(program.state_shapes()).state
    assert max(np.abs(np.asarray(a)).max() for a in jax.tree.leaves(restored.link.residual)) > 0
    again, found = train(program, 2, state=restored, first=4, step=step)
    assert found == expected
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), again, through)))


def test_a_step_that_is_not_finite_keeps_what_is_to_be_sent():
    program = make(changed(compression="int8"))
    step = program.compile_step({})
    state, _ = train(program, 2, step=step)
    before = jax.tree.map(np.asarray, (state.params, state.link))

    def broken(**kinds):
        batch = packed_batch(**kinds)
        return batch | {"loss_mask": np.where(np.arange(16)[:, None] == 11, np.inf, batch["loss_mask"])}

    state, metrics = train(program, 1, state=state, first=3, batch=broken, step=step)
    assert metrics[0]["finite"] == 0 and metrics[0]["skipped"] == 1
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, (state.params, state.link), before)))


def refused(config, spec=ALL):
    rules = Rules.make(config.rules, spec)
    with pytest.raises(ShardlmError) as error:
        check_batch(config.train, rules.mesh)
        check_replicas(config, rules)
    return str(error.value)


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_weights_sharded_over_data_are_refused(preset):
    for what, config in (
        ("slow_link.compression=int8", changed(compression="int8", rules=preset)),
        ("train.shares=(1, 3)", changed(shares=(1, 3), rules=preset)),
        ("local_sgd.inner_steps=4", changed(local=LocalSgdConfig(4), rules=preset)),
    ):
        message = refused(config)
        assert what in message and f"rules={preset} shards them over data=2" in message
        assert "choose rules=hybrid" in message


def test_compression_on_another_axis_than_data_is_refused():
    message = refused(changed(compression="bf16"), MeshSpec(fsdp=4, tensor=2))
    assert "slow_link.compression=bf16 works between replicas of the data axis, and mesh.data=1" in message
    assert "the mesh is fsdp=4 x tensor=2" in message and "Set mesh.data to the number" in message


def test_shares_that_do_not_fit_are_refused():
    assert "train.shares=(1, 2, 3) is for 3 replicas and mesh.data=2" in refused(changed(shares=(1, 2, 3)))
    message = refused(changed(shares=(1, 4)))
    assert "train.global_batch=16 cannot be split over sum of shares=5 x fsdp=2, 10 ways; choose 10 or 20" in message
    twice = changed(shares=(1, 3))
    twice = dataclasses.replace(twice, train=dataclasses.replace(twice.train, accumulation=2))
    assert "the shares are the microbatches of each replica; leave train.accumulation=1" in refused(twice)
    for axis in ("pipeline", "context"):
        message = refused(changed(shares=(1, 3)), MeshSpec(data=2, **{axis: 2}))
        assert f"train.shares=(1, 3) with mesh.{axis}=2: its ring would wait" in message
    with pytest.raises(ShardlmError, match=r"train.shares=\(0, 2\): each replica takes at least 1 microbatch"):
        TrainConfig(shares=(0, 2))
    with pytest.raises(ShardlmError, match=r"slow_link.rank=0"):
        changed(compression="powersgd", rank=0)


def test_local_sgd_that_cannot_run_is_refused():
    local = changed(local=LocalSgdConfig(7))
    assert "train.steps=96 is not a multiple of local_sgd.inner_steps=7" in refused(local)
    assert "choose 91 or 98 steps" in refused(local)
    half = dataclasses.replace(changed(local=LocalSgdConfig(4)), precision="fp16")
    assert "choose bf16 or fp32" in refused(half)
    averaged = changed(local=LocalSgdConfig(4), optim=OptimConfig(ema_decay=0.9))
    assert "optim.ema_decay=0.9 with local_sgd" in refused(averaged)
    for fields in ({"inner_steps": -1}, {"outer_momentum": 1.0}, {"mixing": -0.1}, {"outer_learning_rate": 0}):
        with pytest.raises(ShardlmError, match=r"local_sgd.inner_steps=|local_sgd.outer_learning_rate="):
            LocalSgdConfig(**fields)
    with pytest.raises(ShardlmError, match=r"leaves 2 steps to a fragment, and overlap=3; .* at least 12, or fewer"):
        LocalSgdConfig(8, fragments=4, overlap=3)


def test_an_ordinary_run_keeps_nothing_apart():
    program = make(CONFIG)
    assert program.strategy.traffic == "" and program.state_shapes().link is None
