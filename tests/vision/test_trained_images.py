"""Training on images: what packed rows with them come to is what transformers says, on one device and on meshes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import references
from trained import packed

from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig
from shardlm.train.program import Program
from shardlm.train.seeing import sight_of_run

ROWS, LENGTH = ((0, 1), (1,), (0,), (1, 0)), 128


def program_of(folder, mesh=None, **train) -> Program:
    own = {"global_batch": len(ROWS), "seq_len": LENGTH, "mtp_loss": 0.0, **train}
    config = RunConfig(Pretrained(str(folder), mtp=False), mesh=mesh or MeshSpec(), precision="fp32", remat="none")
    config = dataclasses.replace(config, train=TrainConfig(**own))
    program = Program.make(config, config.mesh.build(jax.devices()[: config.mesh.size(*config.mesh.sizes())]))
    return program.that_sees(sight_of_run(config))


def batch_of(program: Program, name: str, eyes):
    asks = references.asks(name)
    batch, images = packed(program.seeing.sight, asks, ROWS, LENGTH)
    batch["images"] = program.seeing.readers(program.slots)(images)
    return program.on_devices(batch, tuple(range(len(ROWS))), eyes)


def losses(program: Program, name: str, folder) -> dict[str, float]:
    """Loss and gradients."""
    eyes = program.seeing.load(str(folder))
    with jax.set_mesh(program.mesh):
        batch, state = batch_of(program, name, eyes), program.init(program.pretrained())
        found = program.lower_eval().compile()(state.params, None, batch)
        _, metrics = program.compile_step({})(1, state, batch)
    return {n: float(v) for n, v in found.items()} | {n: float(metrics[n]) for n in ("loss", "grad_norm")}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "mistral3", "llama4"])
def test_rows_with_images_are_what_transformers_says(name, tmp_path):
    folder = references.folder(name, tmp_path)
    program = program_of(folder)
    found = losses(program, name, folder)
    said = [np.array(one["prompt"]) for one in references.said(name)]
    own = -np.concatenate([said[number] for row in ROWS for number in row])
    assert found["tokens"] == len(own)
    assert abs(found["loss"] / len(own) - own.mean()) < 1e-4
