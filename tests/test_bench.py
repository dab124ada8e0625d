"""The training benchmark: its JSON is complete and consistent. Nothing here is timed."""

import dataclasses
import json

import pytest
from small import LLAMA, mesh_of

from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.train.bench import bench_training
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program


def test_result_is_complete_and_consistent():
    train = TrainConfig(steps=10, global_batch=8, seq_len=32)
    config = RunConfig(
        model=LLAMA, precision="fp32", optim=OptimConfig(warmup_steps=2, learning_rate=1e-2), train=train
    )
    result = bench_training(Program.make(config, mesh_of(MeshSpec(fsdp=2, tensor=2))), warmup=1, steps=4)
    assert json.loads(json.dumps(result)) == result
    assert result["tokens_per_second"] * result["step_seconds"]["p50"] == pytest.approx(8 * 32)
    assert result["step_seconds"]["min"] <= result["step_seconds"]["p10"] <= result["step_seconds"]["p90"]
    weights = LLAMA.transformer().parameters_per_token()
    pairs = 8 * 32 * 33 // 2
    attention = 12 * LLAMA.num_layers * LLAMA.num_heads * LLAMA.head_dim * pairs
    assert result["model_flops_per_step"] == 6 * weights * 8 * 32 + attention
    assert result["loss_last"] < result["loss_first"]
    assert result["mfu"] is None and result["devices"] == 4 and result["mesh"]["tensor"] == 2
    assert set(result["versions"]) == {"jax", "jaxlib", "flax", "optax", "python", "shardlm"}
    assert dataclasses.asdict(config)["precision"] == result["precision"]
