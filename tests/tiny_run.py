"""A training run that takes seconds, started as a user starts it: shared by the tests of the command line."""

import json
import os
import pathlib
import subprocess
import sys

import commands

CONFIG = """
from shardlm.checkpoint import CheckpointConfig
from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.llama import LlamaConfig
from shardlm.optim import OptimConfig
from shardlm.train.config import RunConfig, TrainConfig


def get_config():
    return RunConfig(
        model=LlamaConfig(vocab_size=320, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
                          mlp_dim=64, rope_theta=10_000.0),
        data=DataConfig(train=("{home}/train.txt",), validation=("{home}/validation.txt",), tokenizer="bpe:300",
                        cache_dir="{home}/data"),
        mesh=MeshSpec(data=2, fsdp=2, tensor=2),
        precision="fp32",
        remat="none",
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=3, ema_decay=0.9),
        train=TrainConfig(steps=12, global_batch=8, seq_len=32, log_every=1, eval_every=6, eval_batches=2),
        checkpoint=CheckpointConfig(every_steps=4, keep=9),
        run_dir="{home}/run",
        cpu_devices=8,
    )
"""
TEXT = "".join(f"def f{i}(x, y):\n    return x * {i} + y - {i * i % 17}\n\n" for i in range(400))


def write(home: pathlib.Path) -> pathlib.Path:
    """Data and configuration in `home`; returns the configuration's path."""
    (home / "train.txt").write_text(TEXT)
    (home / "validation.txt").write_text(TEXT[:4000].replace("f", "g"))
    path = home / "config.py"
    path.write_text(CONFIG.format(home=home))
    return path


def command(config: pathlib.Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "launch.train", f"--config={config}", *(f"--config.{flag}" for flag in flags)]


def environment() -> dict[str, str]:
    """Without this process's virtual devices: the run makes its own."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


def train(config: pathlib.Path, *flags: str, extra: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Runs to the end."""
    return commands.run("launch.train", *command(config, *flags)[3:], *extra, env=environment())


def start(config: pathlib.Path, *flags: str, extra: tuple[str, ...] = (), last: bool = False) -> subprocess.Popen:
    """Under way. `last`: where cores are scarce the test goes before it, so that it does not end unseen."""
    words = [*(("nice", "-n", "19") if last else ()), *command(config, *flags), *extra]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())


def losses(run: pathlib.Path) -> dict[tuple[int, str], float]:
    """(step, metric) -> value, of the losses a run logged."""
    names = ("loss", "validation_loss", "validation_loss_ema", "grad_norm")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {(line["step"], name): line[name] for line in lines for name in names if name in line}


def largest_difference(found: dict, expected: dict) -> float:
    assert found.keys() == expected.keys()
    return max(abs(found[key] - expected[key]) for key in expected)
