"""Checkpoints as a run meets them: other meshes, retention, kill -9, damage, a full disk, another model."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import logging as absl_logging
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from ports import free_port

from shardlm import checkpoint
from shardlm.checkpoint import CheckpointConfig, Checkpoints, retained
from shardlm.errors import ShardlmError

CONFIG = CheckpointConfig(every_steps=10, keep=9, keep_best=0)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class State:
    params: dict
    opt_state: optax.OptState
    step: jax.Array


def make_state(scale=1.0):
    weights = np.random.default_rng(0).standard_normal((3, 16, 8), np.float32)
    params = {
        "layers": {"w": jnp.asarray(weights * scale), "norm": jnp.full((16,), 1 / 3, jnp.bfloat16)},
        "head": {"w": jnp.asarray(weights[0] * 3)},
    }
    return State(params, optax.adamw(1e-3, mu_dtype=jnp.bfloat16).init(params), jnp.int32(7))


def sharding(leaf, shape, kind=AxisType.Auto):
    """A sharding on a mesh of `shape` that cuts the last two axes where there are two."""
    if shape is None:
        return SingleDeviceSharding(jax.devices()[3])
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(kind, kind))
    return NamedSharding(mesh, P(*[None] * (leaf.ndim - 2), "fsdp", "tensor") if leaf.ndim > 1 else P())


def on_mesh(state, shape, kind=AxisType.Auto):
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf, shape, kind)), state)


def abstract(state, shape=(2, 4), kind=AxisType.Auto):
    def leaf(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding(array, shape, kind))

    return jax.tree.map(leaf, state)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints at 10 and 20; tests that change it take a copy."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    with Checkpoints(directory, CONFIG) as checkpoints:
        checkpoints.save(10, on_mesh(make_state(), (2, 4)), {"windows": 10}, {"validation_loss": 3.0})
        checkpoints.save(20, on_mesh(make_state(2.0), (2, 4)), {"windows": 20}, {"validation_loss": float("nan")})
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8), None])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_checkpoint_restores_onto_any_mesh(saved, shape, kind):
    wanted = abstract(make_state(), shape, kind)
    restored = Checkpoints(saved).restore(wanted)
    assert_same(restored.state, make_state(2.0))
    assert restored.step == 20 and restored.data_state == {"windows": 20}
    assert np.isnan(restored.metrics["validation_loss"])
    for leaf, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == want.sharding


def test_an_older_one_and_a_part_of_one(saved):
    checkpoints = Checkpoints(saved)
    assert checkpoints.steps() == [10, 20] and checkpoints.latest() == 20
    assert_same(checkpoints.restore(abstract(make_state()), step=10).state, make_state())
    params = checkpoints.restore_params(abstract(make_state().params, (4, 2)), step=10)
    assert_same(params, make_state().params)


def test_parameters_alone_are_cast_and_need_no_optimizer_state(copied):
    wanted = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), make_state().params)
    got = Checkpoints(copied).restore_params(abstract(wanted), step=10)
    assert_same(got, jax.tree.map(lambda a: a.astype(jnp.bfloat16), make_state().params))
    with pytest.raises(ShardlmError, match=r"checkpoints/20 has no 'ema'; it has opt_state, params, step"):
        Checkpoints(copied).restore_params(abstract(wanted), name="ema")


def test_a_part_that_the_run_was_without_is_said(tmp_path):
    state = on_mesh({"params": {"w": jnp.ones(8)}}, (2, 4))
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, state | {"ema": None}, {}, {})
    with pytest.raises(ShardlmError, match="/1 has no 'ema'; it has params"):
        Checkpoints(tmp_path).restore_params(abstract(state["params"]), name="ema", optional=("mtp",))


def test_a_save_returns_before_it_is_done_and_donation_does_not_touch_it(tmp_path, monkeypatch):
    watched = []
    monkeypatch.setattr(checkpoint, "while_growing", lambda path: watched.append(path) or contextlib.nullcontext())
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)
    state = on_mesh({"params": jnp.ones((2048, 2048))}, (2, 4))
    wanted = abstract(state)
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, state, {}, {})
        jax.block_until_ready(double(state))
        assert checkpoints.steps() in ([], [1])
        checkpoints.wait()
        assert checkpoints.steps() == [1]
        checkpoints.save(1, state, {}, {})  # where the run stands: nothing to do
    assert watched == [tmp_path / f"1{checkpoint.TEMPORARY}"]  # as a slow save gives signs of life
    assert_same(Checkpoints(tmp_path).restore(wanted).state, {"params": jnp.ones((2048, 2048))})


def test_orbax_is_quiet_and_nobody_else_is(tmp_path, caplog):
    caplog.set_level("INFO")
    state = {"params": jnp.ones(4)}
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.restore(abstract(state))
        absl_logging.info("heard")
    assert [record.getMessage() for record in caplog.records] == ["heard"]


PROCESS = """
import sys, jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from shardlm.checkpoint import CheckpointConfig, Checkpoints
mesh = jax.make_mesh((16,), ("x",), axis_types=(AxisType.Auto,))
rows, columns = (NamedSharding(mesh, spec) for spec in (P("x"), P(None, "x")))
value = np.arange(1024.0, dtype=np.float32).reshape(32, 32)
with Checkpoints(sys.argv[1], CheckpointConfig(every_steps=1)) as checkpoints:
    array = jax.make_array_from_callback((32, 32), rows, lambda index: value[index])
    checkpoints.save(1, {"params": array}, {"windows": jax.process_index()}, {})
    checkpoints.wait()
    restored = checkpoints.restore({"params": jax.ShapeDtypeStruct((32, 32), jnp.float32, sharding=columns)})
    assert restored.data_state == {"windows": jax.process_index()}
    assert all((part.data == value[part.index]).all() for part in restored.state["params"].addressable_shards)
"""


def test_several_processes_write_one_checkpoint(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", PROCESS, tmp_path, address]
    processes = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)]
    for process in processes:
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors
    params = abstract(jnp.ones((32, 32)), (4, 2))
    got = Checkpoints(tmp_path).restore_params(params)
    np.testing.assert_array_equal(got, np.arange(1024.0).reshape(32, 32))


def test_due_every_so_many_steps(tmp_path):
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        assert [step for step in range(1, 31) if checkpoints.due(step)] == [10, 20, 30]


def test_latest_and_best_are_kept_across_a_restart(tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: 3.5, 5: float("nan"), 6: None, 7: 3.4}
    for steps in ((1, 2, 3, 4), (5, 6, 7)):
        with Checkpoints(tmp_path, CheckpointConfig(every_steps=1, keep=2, keep_best=2)) as checkpoints:
            for step in steps:
                loss = {} if losses[step] is None else {"validation_loss": losses[step]}
                checkpoints.save(step, {"params": jnp.ones(4)}, {}, loss)
    assert checkpoints.steps() == [2, 6, 7]


LOSSES = st.dictionaries(st.integers(0, 99), st.none() | st.floats())


@given(LOSSES, st.integers(1, 4), st.integers(0, 4))
def test_what_is_retained(losses, keep, keep_best):
    kept = retained(losses, CheckpointConfig(keep=keep, keep_best=keep_best))
    assert set(sorted(losses)[-keep:]) <= kept <= set(losses)
    assert len(kept) <= keep + keep_best
    ranked = {step: loss for step, loss in losses.items() if loss is not None and loss == loss}
    best = {step for step, loss in ranked.items() if sum(other < loss for other in ranked.values()) < keep_best}
    assert len(best & kept) >= min(keep_best, len(ranked))


@pytest.mark.parametrize("values", [{"every_steps": 0}, {"keep": 0}, {"keep_best": -1}])
def test_a_configuration_that_keeps_nothing_is_refused(values):
    with pytest.raises(ShardlmError, match="every_steps and keep must be at least 1 and keep_best at least 0"):
        CheckpointConfig(**values)


KILLED = """
import os, pathlib, signal, sys, jax.numpy as jnp
from shardlm.checkpoint import CheckpointConfig, Checkpoints
directory = pathlib.Path(sys.argv[1])
finish = Checkpoints._write_manifest  # called when all data are on disk, before the checkpoint gets its name


def killed(self):
    if (directory / "1").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self)


Checkpoints._write_manifest = killed
checkpoints = Checkpoints(directory, CheckpointConfig(every_steps=1))
checkpoints.save(1, {"params": jnp.ones((8, 8))}, {"windows": 1}, {})
checkpoints.save(2, {"params": jnp.ones((512, 512))}, {"windows": 2}, {})
checkpoints.wait()
"""


def test_a_kill_during_a_save_leaves_the_checkpoint_before_it(tmp_path):
    child = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=os.getcwd(), capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert Checkpoints(tmp_path).steps() == [1]
    assert len(list(tmp_path.iterdir())) == 2  # a reader leaves another run's save alone
    with Checkpoints(tmp_path, CONFIG) as checkpoints:
        assert checkpoints.latest() == 1 and checkpoints.removed == ("2.orbax-checkpoint-tmp",)
        restored = checkpoints.restore(abstract({"params": jnp.ones((8, 8))}))
        assert restored.data_state == {"windows": 1}
        checkpoints.save(2, restored.state, {"windows": 2}, {})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["1", "2"]


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [os.remove, truncate])
@pytest.mark.parametrize(
    "name",
    ["state/d/*", "state/ocdbt.process_0/d/*", "state/_METADATA", "data/process_0-of-1.json", "shardlm.json"],
)
def test_damage_is_named_with_the_way_on(copied, name, damage):
    victim = next((copied / "20").glob(name))
    damage(victim)
    with Checkpoints(copied, CONFIG) as checkpoints:
        with pytest.raises(ShardlmError) as error:
            checkpoints.restore(abstract(make_state()))
        message = str(error.value)
        assert f"{copied}/20 is damaged: {victim.relative_to(copied / '20')}" in message
        assert f"to continue from step 10, move or delete {copied}/20, then run the same command" in message
    shutil.rmtree(copied / "20")  # as the message says
    with Checkpoints(copied, CONFIG) as checkpoints:
        assert checkpoints.restore(abstract(make_state())).step == 10
        checkpoints.save(20, make_state(), {}, {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # reads that Orbax abandons
@pytest.mark.parametrize("name", ["state/d/*", "state/_METADATA", "data/process_0-of-1.json", "shardlm.json"])
def test_damage_that_sizes_do_not_show_is_found_in_reading(copied, name):
    victim = next((copied / "20").glob(name))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(content)
    with pytest.raises(ShardlmError, match=r"checkpoints/20 is damaged: .*Whole ones are at step 10"):
        Checkpoints(copied).restore(abstract(make_state()))


def test_the_last_whole_checkpoint_damaged(copied):
    for step in (10, 20):
        (copied / str(step) / "state" / "_METADATA").unlink()
    with pytest.raises(ShardlmError, match="There is no other whole one: start again in a new run directory"):
        Checkpoints(copied).restore(abstract(make_state()))


def test_another_model_is_refused_with_the_first_differences(saved):
    state = make_state()
    other = {"layers": {**state.params["layers"], "w": jnp.ones((3, 16, 4))}, "extra": jnp.ones(2)}
    wanted = dataclasses.replace(state, params=other, step=jnp.float32(0))
    with pytest.raises(ShardlmError) as error:
        Checkpoints(saved).restore(abstract(wanted))
    for part in (
        "params.extra is not in the checkpoint and float32[2] in this model",
        "params.head.w is float32[16, 8] in the checkpoint and not in this model",
        "params.layers.w is float32[3, 16, 8] in the checkpoint and float32[3, 16, 4] in this model; and 1",
        "Use the configuration it was saved with",
    ):
        assert part in str(error.value)
    with pytest.raises(ShardlmError, match=r"step is int32\[\] in the checkpoint and float32\[\] in this model"):
        Checkpoints(saved).restore(abstract(dataclasses.replace(state, step=jnp.float32(0))))
    with pytest.raises(ShardlmError, match=r"params\.extra is not in the checkpoint"):
        Checkpoints(saved).restore_params(abstract(other))


def test_what_is_not_there(saved, tmp_path):
    with pytest.raises(ShardlmError, match=f"no checkpoint in {tmp_path}/none: no save was completed there"):
        Checkpoints(tmp_path / "none").restore(abstract(make_state()))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ShardlmError, match=r"no checkpoint at step 15 in .*; there are 10, 20"):
        Checkpoints(saved).restore(abstract(make_state()), step=15)


def test_a_run_that_did_not_continue_from_the_latest_does_not_mix_with_it(copied):
    with Checkpoints(copied, CONFIG) as checkpoints:
        for step in (15, 20):
            with pytest.raises(ShardlmError, match=f"checkpoint of step 20, and this run is at {step}"):
                checkpoints.save(step, make_state(), {}, {})
        with pytest.raises(ShardlmError, match=r"later checkpoints than step 10: 20. To continue from step 10"):
            checkpoints.restore(abstract(make_state()), step=10)
        checkpoints.restore(abstract(make_state()))
        checkpoints.save(20, make_state(), {}, {})  # it is there already


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ShardlmError, match=r"Cannot write .*file/checkpoints: Not a directory"):
        Checkpoints(tmp_path / "file" / "checkpoints", CONFIG)


def test_positions_in_the_data_of_another_number_of_processes(copied):
    data = copied / "20" / "data"
    manifest = json.loads((copied / "20" / "shardlm.json").read_text())
    manifest["files"] = {k: v for k, v in manifest["files"].items() if not k.startswith("data/")}
    (copied / "20" / "shardlm.json").write_text(json.dumps(manifest))
    (data / "process_0-of-1.json").rename(data / "process_0-of-2.json")
    (data / "process_1-of-2.json").write_text('{"windows": 20}')
    assert Checkpoints(copied).restore(abstract(make_state())).data_state == {"windows": 20}
    (data / "process_1-of-2.json").write_text('{"windows": 21}')
    with pytest.raises(ShardlmError, match=r"saved by 2 processes, .* this run has 1: .* Resume with 2 processes"):
        Checkpoints(copied).restore(abstract(make_state()))
