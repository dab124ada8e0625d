"""The training benchmark: its JSON is complete and consistent. Nothing here is timed."""

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import jax
import pytest
from small import LLAMA, mesh_of

from shardlm.config import resolve
from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.optim import OptimConfig
from shardlm.train import strategies
from shardlm.train.bench import _setting, bench_training, random_batch
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig
from shardlm.train.policy import Policy
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


def test_what_is_not_timed_of_a_configuration_is_said(program):
    train = dataclasses.replace(program.config.train, encoder="projector")
    sees = dataclasses.replace(program, config=dataclasses.replace(program.config, train=train))
    assert _setting(sees)["left_out"].startswith("images and train.encoder=projector: the step is one of text")
    assert "left_out" not in _setting(program)


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


def test_communication_is_told_by_axis_and_kind(result):
    sent = result["communication"]["sent_bytes"]
    assert set(sent) >= {"fsdp", "tensor"}  # weights; activations
    assert sent["fsdp"]["all-gather"] > 0 and sent["tensor"]["all-gather"] > 0
    assert result["communication"]["sent_bytes_total"] == sum(sum(kinds.values()) for kinds in sent.values())
    assert result["communication"]["guesses"] == []


def test_it_trains(result):
    assert result["loss_first"] == pytest.approx(math.log(LLAMA.vocab_size), rel=0.1)
    assert result["loss_last"] < result["loss_first"]


def test_no_timed_step_starts_after_the_time_is_up(program):
    assert bench_training(program, warmup=2, steps=50, seconds=1e-9)["steps"] == 1


def test_a_batch_has_what_the_objective_reads(program):
    of_rewards = dataclasses.replace(program, objective=Policy(GrpoConfig(), 1, None))
    shapes = of_rewards.batch_shapes()
    assert set(Policy.columns) < set(shapes)
    assert {name: a.shape for name, a in random_batch(of_rewards).items()} == {n: s.shape for n, s in shapes.items()}


def test_batch_is_the_same_every_time(program):
    a, b = random_batch(program), random_batch(program)
    assert all((a[name] == b[name]).all() for name in program.batch_shapes())
    assert (a["tokens"][:, 1:] == a["targets"][:, :-1]).all() and (a["segment_ids"] == 1).all()


@pytest.mark.parametrize(("name", "parameters"), [("768x12", 88_099_584), ("288x6", 8_335_008)])
def test_shapes_of_the_comparison_have_the_parameters_of_the_peer(name, parameters):
    config = resolve(str(ROOT / f"configs/bench_{name}.py"), []).config
    program = Program.make(config, mesh_of(MeshSpec()))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.model.shapes)) == parameters


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Two strategies of a smaller model yet, of which tensor parallel cannot split the heads."""
    file = tmp_path_factory.mktemp("strategies") / "table.json"
    small = ["--config.model.num_layers=1", "--config.train.seq_len=16", "--config.model.num_heads=4"]
    small += ["--config.model.num_kv_heads=4", "--strategies=ZeRO-3 (FSDP),tensor", "--steps=1", "--warmup=1"]
    command = [sys.executable, "-m", "launch.bench", "strategies", "--config=configs/bench_strategies.py", *small]
    done = subprocess.run([*command, f"--output={file}"], cwd=ROOT, capture_output=True, text=True)
    return done, json.loads(file.read_text()), file.with_suffix(".md").read_text()


def test_strategies_are_compared_in_one_table(compared):
    done, written, table = compared
    fsdp, tensor = written["rows"]
    assert done.returncode == 1 and table in done.stdout  # one of them failed
    assert fsdp["mesh"] == {"fsdp": 8} and set(fsdp["sent_bytes"]) == {"fsdp"} and fsdp["step_seconds"] > 0
    assert tensor["strategy"] == "tensor" and "4" in tensor["error"] and "tensor=8" in tensor["error"]
    head, _, first, second, _, caption = table.splitlines()
    assert written["steps"] == 1 and "cpu devices, jax" in caption
    assert head.endswith("| sent MiB/step | over fsdp |")
    assert first.startswith("| ZeRO-3 (FSDP) | fsdp=8 | zero3 | ") and second.startswith("| tensor | error: ")


def test_the_table_has_a_column_for_each_set_of_axes():
    shared = {"rules": "zero1", "step_seconds": 0.5, "argument_bytes": 2**20, "temporary_bytes": 2**21}
    one = {"strategy": "a", "mesh": {}, "sent_bytes": {}, **shared}
    two = {"strategy": "b", "mesh": {"data": 2, "fsdp": 4}, **shared}
    two["sent_bytes"] = {"data+fsdp": {"all-reduce": 2**20, "all-gather": 2**19}, "data": {"all-reduce": 2**22}}
    setting = dict.fromkeys(strategies.SETTING, "x") | {"versions": {"jax": "1", "jaxlib": "2"}}
    assert strategies.markdown({"rows": [one, two], **setting}).splitlines()[2:4] == [
        "| a | 1 | zero1 | 0.500 | 1.00 | 2.00 | 0.00 |  |  |",
        "| b | data=2 x fsdp=4 | zero1 | 0.500 | 1.00 | 2.00 | 5.50 | 4.00 | 1.50 |",
    ]


def test_an_unknown_strategy_lists_those_there_are():
    with pytest.raises(ShardlmError, match="there is no strategy 'zero9'; there are one device, data parallel, ZeRO-1"):
        strategies.chosen(["ZeRO-1", "zero9"])


@pytest.mark.parametrize("variant", strategies.VARIANTS, ids=lambda variant: variant.name)
def test_every_strategy_fits_its_configuration(variant):
    changes = [tuple(change.split("=", 1)) for change in variant.changes.split()]
    file = ROOT / (variant.config or "configs/bench_strategies.py")
    config = resolve(str(file), changes).config
    assert Program.make(config, mesh_of(config.mesh)).mesh.size == config.cpu_devices


@pytest.mark.parametrize("word", ["", "trian", "server"])
def test_an_unknown_benchmark_lists_those_there_are(word):
    done = subprocess.run(
        [sys.executable, "-m", "launch.bench", *filter(None, [word])], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    known = "train: the training step of a configuration, on made-up tokens; serve: a configuration's model "
    assert done.stderr.startswith(f"error: there is no benchmark {word!r}; there is {known}")
