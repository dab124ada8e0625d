"""Runs on rewards of small checkpoints that see: prompts with images in files, and a few steps."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import references
from PIL import Image

from shardlm.data.config import DataConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.optim import OptimConfig
from shardlm.reinforce.task import Rewards
from shardlm.train.config import GrpoConfig, RunConfig, TrainConfig
from shardlm.train.program import Program

JUDGE = """
def even(prompts, completions, completion_ids, images, **columns):
    assert all(isinstance(path, str) for own in images or () for path in own or ())
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def asked(name: str, folder: pathlib.Path, home: pathlib.Path) -> pathlib.Path:
    """The prompts of a reference as JSONL of texts with images beside it, and one without."""
    from shardlm.tokenizer import Tokenizer

    tokenizer, lines = Tokenizer.load(folder), []
    for number, (ids, images) in enumerate(references.asks(name)):
        paths = [f"{number}.{i}.png" for i in range(len(images))]
        for path, image in zip(paths, images, strict=True):
            Image.fromarray(image).save(home / path)
        lines.append({"prompt": tokenizer.decode(ids, skip_special=False), "images": paths or None})
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (home / "judge.py").write_text(JUDGE)
    return home / "prompts.jsonl"


def config_of(folder: pathlib.Path, home: pathlib.Path, mesh: MeshSpec, **changes: Any) -> RunConfig:
    prompts = (str(home / "prompts.jsonl"),)
    own = {"steps": 4, "global_batch": 8, "seq_len": 160, "mtp_loss": 0.0, **changes.pop("train", {})}
    grpo = {"group_size": 4, "max_tokens": 6, "kv_cache_gib": 0.01, **changes.pop("grpo", {})}
    config = RunConfig(
        Pretrained(str(folder), mtp=False),
        data=DataConfig(train=prompts, validation=prompts, tokenizer=str(folder)),
        mesh=mesh,
        precision="fp32",
        remat="none",
        grpo=GrpoConfig((f"{home}/judge.py:even",), **grpo),
        optim=OptimConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.0, schedule="constant"),
        train=TrainConfig(**own),
    )
    return dataclasses.replace(config, **changes)


def task_of(config: RunConfig) -> Rewards:
    return Rewards.prepared(
        Program.make(config, config.mesh.build(jax.devices()[: config.mesh.size(*config.mesh.sizes())]))
    )


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
