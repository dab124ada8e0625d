"""Training on a GPU: the same numbers as on a CPU, and a run that goes on where it stopped."""

import dataclasses
import os
import shutil

import jax
import numpy as np
import pytest
import tiny_run
from rehearsal import ON_CPU
from small import LLAMA

from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.train.bench import random_batch
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

MODEL = dataclasses.replace(LLAMA, embed_dim=64, head_dim=16)
CONFIG = RunConfig(
    MODEL,
    mesh=MeshSpec(),
    precision="fp32",
    optim=OptimConfig(warmup_steps=1, learning_rate=1e-2),
    train=TrainConfig(steps=10, global_batch=4, seq_len=64, accumulation=2),
)


def losses(config: RunConfig, device: jax.Device, steps: int = 4) -> list[float]:
    """Of so many steps from the configuration's seed, on made-up tokens."""
    program = Program.make(config, config.mesh.build([device]))
    step = program.compile("step", dict(program.xla_options().options))
    found = []
    with jax.set_mesh(program.mesh), jax.default_device(device):
        state, batch = program.init(), random_batch(program)
        for _ in range(steps):
            state, metrics = step(state, batch)
            found += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return found


def test_steps_in_float32_are_those_of_a_cpu(gpu, cpu):
    """Sums in another order, which four steps of AdamW amplify (between two meshes of CPUs: 1e-5)."""
    np.testing.assert_allclose(losses(CONFIG, gpu), losses(CONFIG, cpu), rtol=2e-3)


@pytest.mark.parametrize(
    "changes",
    [{}, {"remat": "none", "attention": "xla"}, {"matmul": "fp8"}, {"matmul": "int8"}, {"remat": "offload"}],
    ids=str,
)
def test_steps_in_bfloat16_are_near(gpu, cpu, changes):
    """cuDNN's attention, 8-bit products and activations in host memory among them; the loss of the first step, of size
    4, and of the fourth."""
    if ON_CPU and changes.get("remat") == "offload":
        pytest.skip("a CPU's memory is the host's")
    found = losses(dataclasses.replace(CONFIG, precision="bf16", **changes), gpu)
    expected = losses(CONFIG, cpu)
    assert found[0] == pytest.approx(expected[0], rel=0.01)
    assert found[6] == pytest.approx(expected[6], rel=0.05) and found[6] < found[0]


def test_a_run_is_resumed(gpu, tmp_path, monkeypatch):
    """Within rounding: a GPU does not add gradients of embeddings in one order."""
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # the run takes every device that it sees
    config = tiny_run.write(tmp_path)
    one = ["mesh.data=1", "mesh.fsdp=1", "mesh.tensor=1", f"cpu_devices={int(ON_CPU)}"]
    done = tiny_run.train(config, *one)
    assert done.returncode == 0, done.stderr
    expected = tiny_run.losses(tmp_path / "run")
    for step in (8, 12):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    again = tiny_run.train(config, *one)
    assert again.returncode == 0, again.stderr
    assert "resuming after step 4" in again.stdout
    assert tiny_run.largest_difference(tiny_run.losses(tmp_path / "run"), expected) < 1e-3
