"""Rewards of replies to images by the command line: a run that stops between two updates with the same replies goes on
bit for bit, and several processes, of which each is shown its own prompts' images, learn what one learns."""

import json
import pathlib

import pytest
import references
import tiny_run
from ports import free_port
from rewarded import write

CONFIG = """
from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig


def get_config():
    prompts = ("{home}/prompts.jsonl",)
    return RunConfig(
        model=Pretrained("{folder}"),
        data=DataConfig(train=prompts, validation=prompts, tokenizer="{folder}"),
        mesh=MeshSpec(fsdp=2),
        precision="fp32",
        remat="none",
        grpo=GrpoConfig(("{home}/judge.py:colour",), group_size=4, max_tokens=4, updates=2, kv_cache_gib=0.01),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.0, schedule="constant"),
        train=TrainConfig(steps=6, global_batch=8, seq_len=24, log_every=1, eval_every=6),
        checkpoint=CheckpointConfig(every_steps=99),
        run_dir="{home}/run",
        cpu_devices=2,
    )
"""
LOGGED = ("loss", "reward", "ratio", "sampling_gap", "surprise", "grad_norm")

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("rewarded")
    folder = references.folder("qwen3_vl", home)
    write("qwen3_vl", home)
    (home / "config.py").write_text(CONFIG.format(home=home, folder=folder))
    done = tiny_run.train(home / "config.py", f"run_dir={home}/one")
    assert done.returncode == 0, done.stderr
    return home


def steps_of(run: pathlib.Path) -> list[dict]:
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if "reward" in line]


def test_a_run_goes_on_between_two_updates_with_the_same_replies(home):
    for steps in (3, 6):
        done = tiny_run.train(home / "config.py", f"train.steps={steps}", f"run_dir={home}/stopped")
        assert done.returncode == 0, done.stderr
    whole, stopped = steps_of(home / "one"), steps_of(home / "stopped")
    assert len(whole) == 6 and all(line["sampling_gap"] < 1e-5 for line in whole[::2])
    for name in LOGGED:
        assert [line[name] for line in whole] == [line[name] for line in stopped], name
    (home / "blue.png").write_bytes((home / "red.png").read_bytes())
    done = tiny_run.train(home / "config.py", "train.steps=8", f"run_dir={home}/stopped")
    write("qwen3_vl", home)
    assert done.returncode == 1 and "the saved position in the prompts does not fit this run" in done.stderr


def test_two_processes_learn_what_one_learns(home):
    cluster = (f"--coordinator_address=localhost:{free_port()}", "--num_processes=2")
    flags = (f"run_dir={home}/two", "cpu_devices=1")
    started = [tiny_run.start(home / "config.py", *flags, extra=(*cluster, f"--process_id={i}")) for i in range(2)]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    one, two = steps_of(home / "one"), steps_of(home / "two")
    for name in LOGGED:
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5, abs=1e-6), name
