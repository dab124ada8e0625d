"""`python -m launch.generate` on a checkpoint: text, its seed, another mesh, and the refusals."""

import re

import jax
import pytest
from commands import run
from small import LLAMA, init, mesh_of, model_on

from launch.other_trainers import OTHER_TRAINERS
from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.config import leaves, load
from shardlm.config_json import to_json
from shardlm.mesh import MeshSpec
from shardlm.run_files import CHECKPOINTS, save_run_files
from shardlm.tokenizer import train_bpe
from shardlm.train.config import RunConfig

TEXT = ["def f(x):\n    return x\n", "class A:\n    pass\n"] * 20


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    train_bpe(TEXT, 280).save(run / "t.json")
    config = RunConfig(model=LLAMA.__class__(**{**LLAMA.__dict__, "vocab_size": 280}), precision="fp32", cpu_devices=8)
    save_run_files(run, to_json(config), run / "t.json")
    with jax.set_mesh(mesh_of(MeshSpec(fsdp=2))), Checkpoints(run / CHECKPOINTS, CheckpointConfig()) as checkpoints:
        params = init(model_on(MeshSpec(fsdp=2), config=config.model))
        checkpoints.save(7, {"params": params}, {}, {})
    return run


def generate(*flags):
    return run("launch.generate", "--max_new_tokens=12", *flags)


def test_text_depends_on_the_seed_and_not_on_the_mesh(run_dir):
    flags = (f"--checkpoint={run_dir}", "--prompt=def ", "--temperature=1")
    first = generate(*flags, "--seed=1")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("def ") and len(first.stdout) > len("def \n")
    assert (
        generate(f"--checkpoint={run_dir}/checkpoints/7", *flags[1:], "--seed=1", "--tensor=2").stdout == first.stdout
    )
    assert generate(*flags, "--seed=2").stdout != first.stdout


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--checkpoint={run}/checkpoints/8", "--prompt=a"], "the run has 7"),
        (
            ["--checkpoint={run}", "--prompt=" + "1 " * 1100],
            "tokens, and the model was made for 1024 positions: shorten",
        ),
        (["--model={run}", "--prompt=a"], "there is no flag --model; here it is --checkpoint"),
        (["{run}", "--prompt=a"], "unexpected arguments: {run}; options begin with --, as --checkpoint={run}"),
        (["--checkpoint={run}"], "--checkpoint=RUN_DIR and --prompt=TEXT are needed"),
        (["--checkpoint={run}", "--prompt=a", "--system=b"], "--system is a message before that of a chat: add --chat"),
        (["--checkpoint={run}", "--prompt=a", "--temperature=-1"], "temperature=-1.0 must be at least 0"),
        (["--checkpoint={run}", "--prompt=a", "--ema"], "ema"),
    ],
)
def test_refusals(run_dir, flags, message):
    result = generate(*(flag.format(run=run_dir) for flag in flags))
    assert result.returncode == 1 and message.format(run=run_dir) in result.stderr and "Traceback" not in result.stderr


def test_a_reply_ends_with_the_positions_of_the_model(run_dir):
    prompt = "1 " * 510
    result = generate(f"--checkpoint={run_dir}", f"--prompt={prompt}", "--max_new_tokens=20", "--temperature=0")
    assert result.returncode == 0 and "ended at the 1024 positions that the model was made for" in result.stderr


@pytest.mark.parametrize(
    "launcher, word, message",
    [
        ("convert", "--output-dir=x", "there is no flag --output-dir; here it is --output"),
        ("train", "--deepspeed=ds.json", "no flag --deepspeed: ZeRO is --config.rules=zero1, zero2 or zero3"),
        ("eval", "--model_args=pretrained=x", "there is no flag --model_args: --checkpoint=FOLDER names the model"),
    ],
)
def test_names_of_other_programs(launcher, word, message):
    result = run(f"launch.{launcher}", word)
    assert result.returncode == 1 and message in result.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (("--tasks=arc_easy", "--ema"), "--ema goes with --text, and --tasks heeds it not: leave it out"),
        (("--text=a.txt", "--limit=3"), "--limit goes with --tasks, and --text heeds it not: leave it out"),
    ],
)
def test_flags_of_the_other_way_to_evaluate(words, message):
    result = run("launch.eval", "--checkpoint=x", *words)
    assert result.returncode == 1 and message in result.stderr


def test_fields_that_stand_for_other_trainers_names_are_there():
    fields = {*leaves(load("configs/sft.py"))}
    told = [path for text in OTHER_TRAINERS.values() for path in re.findall(r"--config\.([\w.]*\w)", text)]
    assert len(told) > 40 and {*told} <= fields
