"""The training benchmark: its JSON is complete and consistent. Nothing here is timed."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import pytest
from small import LLAMA, mesh_of

from shardlm.config import resolve
from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.train.bench import bench_training, random_batch
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.program import Program

ROOT = pathlib.Path(__file__).parent.parent
FIELDS = {
    *("benchmark", "tokens_per_second", "model_flops_per_second", "model_flops_per_step", "flop_convention", "mfu"),
    *("peak_flops_per_second", "step_seconds", "steps", "warmup", "compile_seconds", "compilation_cache"),
    *(
        "peak_memory_bytes",
        "compiled_argument_bytes",
        "compiled_temporary_bytes",
        "loss_first",
        "loss_last",
        "communication",
    ),
    *("xla_options", "xla_options_left_out", "mesh", "rules", "precision", "remat", "unroll", "attention"),
    *("optimizer", "global_batch", "seq_len", "parameters", "device_kind", "devices", "processes", "host_cpus"),
    *("date", "versions"),
}


@pytest.fixture(scope="module")
def program() -> Program:
    train = TrainConfig(steps=10, global_batch=8, seq_len=32)
    optim = OptimConfig(warmup_steps=2, learning_rate=1e-2)
    config = RunConfig(model=LLAMA, precision="fp32", optim=optim, train=train)
    return Program.make(config, mesh_of(MeshSpec(fsdp=2, tensor=2)))


@pytest.fixture(scope="module")
def result(program):
    return bench_training(program, warmup=1, steps=4)


def test_result_is_complete(result):
    assert set(result) == FIELDS
    assert json.loads(json.dumps(result)) == result
    assert set(result["versions"]) == {"jax", "jaxlib", "flax", "optax", "python", "shardlm"}
    assert (result["steps"], result["warmup"], result["devices"]) == (4, 1, 4)
    assert result["mesh"]["tensor"] == 2 and result["rules"] == "zero3" and result["precision"] == "fp32"


def test_rates_agree_with_the_median_step(result):
    seconds = result["step_seconds"]
    assert result["tokens_per_second"] * seconds["p50"] == pytest.approx(8 * 32)
    assert result["model_flops_per_second"] * seconds["p50"] == pytest.approx(result["model_flops_per_step"])
    assert seconds["min"] <= seconds["p10"] <= seconds["p50"] <= seconds["p90"] <= seconds["max"]
    assert result["mfu"] is None and result["peak_flops_per_second"] is None  # a CPU's peak is not known


def test_flops_are_those_of_the_convention(result):
    weights = LLAMA.transformer().parameters_per_token()
    pairs = 8 * 32 * 33 // 2
    attention = 12 * LLAMA.num_layers * LLAMA.num_heads * LLAMA.head_dim * pairs
    assert result["model_flops_per_step"] == 6 * weights * 8 * 32 + attention


def test_memory_says_what_was_compiled_and_what_was_measured(result):
    peak = result["peak_memory_bytes"]
    assert result["compiled_argument_bytes"] > 12 * result["parameters"] / 4
    assert peak["compiled"] >= result["compiled_argument_bytes"] + result["compiled_temporary_bytes"]
    assert peak["measured_on_device"] is None  # XLA:CPU keeps no count
    assert peak["measured_process_rss"] > 50 * 2**20  # bytes, not the KiB that Linux reports


def test_it_trains(result):
    assert result["loss_first"] == pytest.approx(math.log(LLAMA.vocab_size), rel=0.1)
    assert result["loss_last"] < result["loss_first"]


def test_no_timed_step_starts_after_the_time_is_up(program):
    assert bench_training(program, warmup=2, steps=50, seconds=1e-9)["steps"] == 1


def test_batch_is_the_same_every_time(program):
    a, b = random_batch(program), random_batch(program)
    assert all((a[name] == b[name]).all() for name in program.batch_shapes())
    assert (a["tokens"][:, 1:] == a["targets"][:, :-1]).all() and (a["segment_ids"] == 1).all()


@pytest.mark.parametrize(("name", "parameters"), [("768x12", 88_099_584), ("288x6", 8_335_008)])
def test_shapes_of_the_comparison_have_the_parameters_of_the_peer(name, parameters):
    config = resolve(str(ROOT / f"configs/bench_{name}.py"), []).config
    program = Program.make(config, mesh_of(MeshSpec()))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.model.shapes)) == parameters


@pytest.mark.parametrize("word", ["", "trian", "serve"])
def test_an_unknown_benchmark_lists_those_there_are(word):
    done = subprocess.run(
        [sys.executable, "-m", "launch.bench", *filter(None, [word])], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    known = "train: the training step of a configuration, on made-up tokens"
    assert done.stderr == f"error: there is no benchmark {word!r}; there is {known}\n"
