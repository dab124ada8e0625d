"""`python -m launch.generate` on a checkpoint: text, its seed, another mesh, and the refusals."""

import jax
import pytest
from commands import run
from small import LLAMA, init, mesh_of, model_on

from shardlm.checkpoint import CheckpointConfig, Checkpoints
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
        (["--checkpoint={run}"], "--checkpoint=RUN_DIR and --prompt=TEXT are needed"),
        (["--checkpoint={run}", "--prompt=a", "--temperature=-1"], "temperature=-1.0 must be at least 0"),
        (["--checkpoint={run}", "--prompt=a", "--ema"], "ema"),
    ],
)
def test_refusals(run_dir, flags, message):
    result = generate(*(flag.format(run=run_dir) for flag in flags))
    assert result.returncode == 1 and message in result.stderr and "Traceback" not in result.stderr
