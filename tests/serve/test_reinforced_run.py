"""Reinforcement learning by the command line: the reward rises, what samples says what is trained to the
log-probability, and a run that stops between two updates with the same replies goes on bit for bit."""

import dataclasses
import json
import pathlib

import pytest
import tiny_run
from engines import CONFIG as MODEL
from engines import folder_of

CONFIG = """
from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig


def get_config():
    return RunConfig(
        model=Pretrained("{home}/hf"),
        data=DataConfig(train=("{home}/prompts.jsonl",), validation=("{home}/prompts.jsonl",), tokenizer="{home}/hf"),
        mesh=MeshSpec(fsdp=2),
        precision="fp32",
        remat="none",
        grpo=GrpoConfig(("{home}/judge.py:thirds",), max_tokens=12, updates=2, kv_cache_gib=0.01),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.0, schedule="constant"),
        train=TrainConfig(steps=40, global_batch=16, seq_len=32, accumulation=2, log_every=1, eval_every=40),
        checkpoint=CheckpointConfig(every_steps=99),
        run_dir="{home}/run",
        cpu_devices=2,
    )
"""
JUDGE = """
def thirds(prompts, completions, completion_ids, wanted, **columns):
    return [sum(token % 3 == rest for token in ids) / 12 for ids, rest in zip(completion_ids, wanted)]
"""
LOGGED = ("loss", "reward", "ratio", "sampling_gap", "surprise", "clipped_fraction", "reply_tokens", "grad_norm")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("reinforced")
    folder_of(home / "hf", shape=dataclasses.replace(MODEL, num_layers=1))
    prompts = [{"prompt": text, "wanted": 0} for text in ("name", "age", "tags", "true", "x", "12")]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (home / "judge.py").write_text(JUDGE)
    (home / "config.py").write_text(CONFIG.format(home=home))
    return home


def logged(run: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_reward_rises_and_what_samples_is_what_is_trained(home):
    done = tiny_run.train(home / "config.py")
    assert done.returncode == 0, done.stderr
    assert "rewards: thirds; 6 prompts to train on, 6 to validate" in done.stdout
    assert "compiling what samples: 2 copies over 1 devices each\n" in done.stdout
    assert "sampled by 2 copies over 1 devices each" in done.stdout and "validation reward" in done.stdout
    steps = [line for line in logged(home / "run") if "reward" in line]
    first, second = steps[::2], steps[1::2]  # the first update with the same replies, and the second
    assert [line["reward"] for line in first] == [line["reward"] for line in second]
    assert sum(line["reward"] for line in first[-3:]) > 1.3 * sum(line["reward"] for line in first[:3])
    # The sampler's programs and the trainer's sum in another order (measured: 2e-7 to 1e-6 in the mean).
    assert all(line["sampling_gap"] < 1e-5 and abs(line["ratio"] - 1) < 1e-5 for line in first)
    assert all(line["sampling_gap"] > 1e-4 for line in second)
    [validated] = [line for line in logged(home / "run") if "validation_reward" in line]
    assert validated["validation_loss"] == -validated["validation_reward"] < -first[0]["reward"]


@pytest.mark.wide
def test_a_run_goes_on_between_two_updates_with_the_same_replies(home):
    flags = (f"run_dir={home}/stopped", "lora.rank=4", "grpo.beta=0.05", "grpo.loss=grpo")
    whole = tiny_run.train(home / "config.py", f"run_dir={home}/whole", "train.steps=6", *flags[1:])
    assert whole.returncode == 0, whole.stderr
    for steps in (3, 6):
        done = tiny_run.train(home / "config.py", f"train.steps={steps}", *flags)
        assert done.returncode == 0, done.stderr
    both = [[line for line in logged(home / name) if "reward" in line] for name in ("whole", "stopped")]
    assert len(both[0]) == 6
    for name in (*LOGGED, "divergence"):
        assert [line[name] for line in both[0]] == [line[name] for line in both[1]]
    # Adapters added into the weights that sample are rounded with them.
    assert all(line["sampling_gap"] < 1e-5 for line in both[0][::2])


@pytest.mark.wide
def test_what_cannot_be_is_said_at_once(home):
    for flag, message in (
        ("grpo.reward=judge.py:thirds", "there is no file judge.py"),
        ("grpo.tensor=3", "grpo.tensor=3 does not divide 2 devices; choose from 1, 2"),
        ("train.seq_len=13", "are longer than the 1 tokens that train.seq_len leaves beside grpo.max_tokens"),
    ):
        done = tiny_run.train(home / "config.py", flag, f"run_dir={home}/refused")
        assert done.returncode == 1 and message in done.stderr, done.stderr
        assert not (home / "refused").exists()
