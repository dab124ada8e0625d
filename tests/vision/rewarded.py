"""Runs on rewards of small checkpoints that see: which of two pictures a prompt has decides what replies are good."""

import json
import pathlib
from typing import Any

import jax
import numpy as np
from PIL import Image

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.reinforce.task import Rewards
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig
from shardlm.train.program import Program

COLOURS = {"red": (220, 20, 20), "blue": (20, 20, 220)}
# Of prompts that are the same but for the picture: a model that did not see it could have half of it at best.
JUDGE = """
def colour(prompts, completions, completion_ids, images, **columns):
    return [
        sum(token % 2 == (own == ["red.png"]) for token in ids) / len(ids) for ids, own in zip(completion_ids, images)
    ]
"""
ASKS = {"gemma3": "t5 <begin> t6"}
ASK = "t92 <|image_pad|> t93 t5"  # Qwen's


def write(name: str, home: pathlib.Path) -> None:
    """The prompts of a reference's run, their pictures and what judges replies."""
    for colour, value in COLOURS.items():
        Image.fromarray(np.full((16, 16, 3), value, np.uint8)).save(home / f"{colour}.png")
    lines = [{"prompt": ASKS.get(name, ASK), "images": [f"{colour}.png"]} for colour in COLOURS]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (home / "judge.py").write_text(JUDGE)


def config_of(folder: pathlib.Path, home: pathlib.Path, mesh: MeshSpec, **grpo: Any) -> RunConfig:
    prompts = (str(home / "prompts.jsonl"),)
    return RunConfig(
        Pretrained(str(folder), mtp=False),
        data=DataConfig(train=prompts, validation=prompts, tokenizer=str(folder)),
        mesh=mesh,
        precision="fp32",
        remat="none",
        grpo=GrpoConfig(
            (f"{home}/judge.py:colour",), **{"group_size": 4, "max_tokens": 4, "kv_cache_gib": 0.01} | grpo
        ),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.0, schedule="constant"),
        train=TrainConfig(global_batch=8, seq_len=32, mtp_loss=0.0),
    )


def task_of(config: RunConfig) -> Rewards:
    devices = jax.devices()[: config.mesh.size(*config.mesh.sizes())]
    return Rewards.prepared(Program.make(config, config.mesh.build(devices)))


def steps(task: Rewards, count: int) -> tuple[list[dict[str, float]], Any]:
    """(what each step logs, the state after them)."""
    program, source = task.program, task.source()
    with jax.set_mesh(program.mesh):
        state = program.init(program.pretrained(), program.frozen())
        step, found = program.compile_step({}), []
        for number in range(1, count + 1):
            batch, told = source.next(state)
            state, metrics = step(number, state, batch)
            found.append({name: float(np.asarray(value)) for name, value in metrics.items()} | told)
    return found, state
