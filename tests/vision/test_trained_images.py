"""Training on images: what packed rows with them come to is what transformers says, on one device and on meshes."""

import dataclasses

import jax
import numpy as np
import pytest
import references
from flax.traverse_util import flatten_dict
from trained import packed

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.train.config import PipelineConfig, RunConfig, TrainConfig
from shardlm.train.program import Program
from shardlm.train.seeing import sight_of_run

ROWS, LENGTH = ((0, 1), (1,), (0,), (1, 0)), 192


def program_of(folder, mesh=None, pipeline=None, **train) -> Program:
    own = {"global_batch": len(ROWS), "seq_len": LENGTH, "mtp_loss": 0.0, **train}
    config = RunConfig(Pretrained(str(folder), mtp=False), mesh=mesh or MeshSpec(), precision="fp32", remat="full")
    config = dataclasses.replace(config, train=TrainConfig(**own), pipeline=pipeline or PipelineConfig())
    config = dataclasses.replace(config, data=DataConfig(chat_template=str(folder), packing="whole"))
    program = Program.make(config, config.mesh.build(jax.devices()[: config.mesh.size(*config.mesh.sizes())]))
    return program.that_sees(sight_of_run(config))


def batch_of(program: Program, name: str, eyes):
    asks = references.asks(name)
    batch, images = packed(program.seeing.sight, asks, ROWS, LENGTH)
    batch["images"] = program.seeing.readers(program.slots)(images)
    return program.on_devices(batch, tuple(range(len(ROWS))), eyes)


def losses(program: Program, name: str, folder) -> tuple[dict[str, float], dict]:
    """(sums of an evaluation and metrics of a step, the weights after it)."""
    eyes = program.seeing.load(str(folder))
    with jax.set_mesh(program.mesh):
        batch, state = batch_of(program, name, eyes), program.init(program.pretrained())
        found = program.lower_eval().compile()(state.params, None, batch)
        state, metrics = program.compile_step({})(1, state, batch)
    said = {"sum": found["loss"], "tokens": found["tokens"], "loss": metrics["loss"], "norm": metrics["grad_norm"]}
    return {n: float(v) for n, v in said.items()}, flatten_dict(jax.tree.map(np.asarray, state.params))


# Vectors for the first layers and turns on three axes. The others are wide.
FIRST, OTHERS = ("qwen3_vl",), ("gemma3", "qwen2_5_vl", "qwen3_5", "mistral3", "llama4", "gemma4-inputs")
OTHERS += ("qwen4_exp", "aya_vision", "deepseek_vl")
WIDE = pytest.mark.wide


@pytest.mark.parametrize("name", [*FIRST, *(pytest.param(name, marks=WIDE) for name in OTHERS)])
def test_rows_with_images_are_what_transformers_says(name, tmp_path):
    folder = references.folder(name, tmp_path)
    found, _ = losses(program_of(folder), name, folder)
    said = [np.array(one["prompt"]) for one in references.said(name)]
    own = -np.concatenate([said[number] for row in ROWS for number in row])
    assert found["tokens"] == len(own)
    assert abs(found["sum"] / len(own) - own.mean()) < 1e-5
    assert abs(found["loss"] - own.mean()) < 1e-5


@pytest.mark.parametrize(
    "mesh, pipeline",
    [
        pytest.param(MeshSpec(data=2, tensor=2), PipelineConfig(), marks=WIDE),
        pytest.param(MeshSpec(fsdp=2, context=2), PipelineConfig(), marks=WIDE),
        pytest.param(MeshSpec(pipeline=2, fsdp=2), PipelineConfig(schedule="gpipe", rounds=1), marks=WIDE),
        (MeshSpec(pipeline=2, tensor=2), PipelineConfig(schedule="1f1b")),
    ],
    ids=str,
)
def test_any_mesh_sees_the_same(mesh, pipeline, one_device, tmp_path):
    """Vectors for the embedding, turns on three axes, and vectors for the first layers."""
    name = "qwen3_vl"
    folder = references.folder(name, tmp_path)
    program = program_of(folder, mesh, pipeline, accumulation=2)
    found, weights = losses(program, name, folder)
    expected, theirs = one_device
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["sum"] == pytest.approx(expected["sum"], rel=1e-5)
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    apart = {path: np.abs(weights[path] - theirs[path]).max() for path in theirs}
    assert max(apart.values()) < 2e-3, apart


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    folder = references.folder("qwen3_vl", tmp_path_factory.mktemp("one"))
    return losses(program_of(folder), "qwen3_vl", folder)
