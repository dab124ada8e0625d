"""The training step: overflow in float16, bad steps, the average of the weights, and the learning rate it reports."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import LLAMA, mesh_of, on_devices, packed_batch, relative_error

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.precision import GROWTH_INTERVAL, LossScale
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.faults import check_finite
from shardlm.train.program import Program

CONFIG = RunConfig(
    model=LLAMA,
    precision="fp32",
    optim=OptimConfig(learning_rate=1e-2, warmup_steps=4, ema_decay=0.75),
    train=TrainConfig(steps=100, global_batch=16, seq_len=16),
)


def steps(config, count, change=lambda state: state):
    """States and metrics of the first steps, from a state that `change` may alter."""
    program = Program.make(config, mesh_of(MeshSpec(data=2, fsdp=2, tensor=2)))
    compiled = program.lower_step().compile()
    states, metrics = [change(program.init())], []
    with jax.set_mesh(program.mesh):
        batch = on_devices(packed_batch(), program.model)
        for _ in range(count):
            copy = jax.tree.map(jnp.copy, states[-1])  # the step donates its argument
            new, found = compiled(copy, batch)
            states.append(new)
            metrics.append({name: float(value) for name, value in found.items()})
    return states, metrics


def test_overflow_in_fp16_is_skipped_reported_and_halves_the_scale():
    def raise_scale(state):
        scale = jax.device_put(jnp.float32(2.0**24), state.loss_scale.scale.sharding)
        return dataclasses.replace(state, loss_scale=dataclasses.replace(state.loss_scale, scale=scale))

    states, metrics = steps(dataclasses.replace(CONFIG, precision="fp16"), 14, raise_scale)
    assert metrics[0]["finite"] == 0 and metrics[0]["loss_scale"] == 2.0**24 and metrics[0]["bad_steps"] == 0
    assert relative_error(states[1].params, states[0].params) == 0 and relative_error(states[1].ema, states[0].ema) == 0
    assert float(states[1].loss_scale.scale) == 2.0**23 and int(states[1].skipped) == 1
    assert metrics[-1]["finite"] == 1 and metrics[-1]["loss"] < metrics[0]["loss"]
    line = check_finite(1, metrics[0], max_bad_steps=1, rows="batch 0", remedy="")
    assert "update skipped; overflow at loss scale 16777216, halved" in line


def test_fp16_follows_fp32():
    _, half = steps(dataclasses.replace(CONFIG, precision="fp16"), 8)
    _, full = steps(CONFIG, 8)
    # 11 bits of mantissa in the matmuls, eight steps (measured: 0.002).
    np.testing.assert_allclose([m["loss"] for m in half], [m["loss"] for m in full], atol=0.02)


def test_loss_scale_grows_after_good_steps_and_stays_in_range():
    scale = LossScale(jnp.float32(4.0), jnp.int32(GROWTH_INTERVAL - 1))
    assert float(scale.update(jnp.array(True)).scale) == 8.0
    assert int(scale.update(jnp.array(True)).good_steps) == 0
    assert float(LossScale(jnp.float32(1.0), jnp.int32(0)).update(jnp.array(False)).scale) == 1.0


def test_average_of_the_weights_and_the_reported_rate():
    states, metrics = steps(CONFIG, 3)
    expected = states[0].params
    for state in states[1:]:
        expected = jax.tree.map(
            lambda old, new: 0.75 * np.asarray(old) + 0.25 * np.asarray(new), expected, state.params
        )
    assert relative_error(states[-1].ema, expected) < 1e-6
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [0.0025, 0.005, 0.0075], rtol=1e-6)


def test_clipping_bounds_the_update():
    sgd = OptimConfig(name="sgd", b1=0, weight_decay=0, learning_rate=1.0, schedule="constant", warmup_steps=0)
    for clip in (0.01, 0.0):
        states, metrics = steps(dataclasses.replace(CONFIG, optim=dataclasses.replace(sgd, clip_norm=clip)), 1)
        moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), states[1].params, states[0].params)
        norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(moved)))
        np.testing.assert_allclose(norm, clip or metrics[0]["grad_norm"], rtol=1e-3)


def test_counts_are_of_what_is_attended():
    _, metrics = steps(CONFIG, 1)
    batch = packed_batch()
    real = batch["segment_ids"] > 0
    assert metrics[0]["tokens"] == real.sum()
    assert metrics[0]["attention_pairs"] == (batch["positions"] + 1)[real].sum()


def test_too_many_bad_steps_name_the_step_and_the_batch():
    values = {"finite": 0.0, "loss": float("nan"), "grad_norm": 1.0, "bad_steps": 2.0}
    assert "update skipped" in check_finite(7, values, max_bad_steps=3, rows="batch 6", remedy="")
    with pytest.raises(ShardlmError, match=r"step 7: loss nan, .* on batch 6; not finite for 2 steps in a row"):
        check_finite(7, values, max_bad_steps=2, rows="batch 6", remedy="")


def test_a_model_by_its_name_is_refused():
    with pytest.raises(ShardlmError, match=r"model='llama' is no architecture: give its configuration, as LlamaConfig"):
        RunConfig("llama")


def test_a_run_needs_a_folder():
    with pytest.raises(ShardlmError, match="run_dir is empty: name a folder"):
        RunConfig("llama", run_dir="")
