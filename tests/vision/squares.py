"""Runs on what examples/square_chats.py makes, of a few steps, and what engines say to the same conversations."""

import dataclasses
import importlib.util
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardlm import LLM, config
from shardlm.chat import ChatTemplate
from shardlm.data.chats import conversation
from shardlm.data.rendering import Chats, Document
from shardlm.mesh import MeshSpec
from shardlm.serve.sampling_params import SamplingParams
from shardlm.tokenizer import Tokenizer
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.loop import train
from shardlm.vision.read import pixels_of

ROOT = pathlib.Path(__file__).parent.parent.parent
MESH = MeshSpec(fsdp=8)  # all devices of a test
SIZES = {"max_model_len": 128, "max_num_batched_tokens": 48, "max_num_seqs": 4, "block_size": 4}


def made(home: pathlib.Path) -> pathlib.Path:
    """The example's folder, with few conversations."""
    spec = importlib.util.spec_from_file_location("square_chats", ROOT / "examples" / "square_chats.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(home, 40, 8)
    return home


def config_of(home: pathlib.Path, run: pathlib.Path, **changes) -> RunConfig:
    """configs/sft_images.py, of four steps."""
    found = config.load(str(ROOT / "configs" / "sft_images.py"))
    model = dataclasses.replace(found.model, folder=str(home / "model"))
    files = {name: (str(home / f"{name}.jsonl"),) for name in ("train", "validation")}
    own = {"tokenizer": str(home / "model"), "chat_template": str(home / "model"), "cache_dir": str(home / "cache")}
    data = dataclasses.replace(found.data, **files, **own)
    steps = TrainConfig(steps=4, global_batch=8, seq_len=128, log_every=1, eval_every=4)
    optim = dataclasses.replace(found.optim, warmup_steps=1)
    given = {"model": model, "data": data, "train": steps, "optim": optim, "mesh": MESH, "run_dir": str(run)}
    return dataclasses.replace(found, **given | changes)


def trained(of: RunConfig) -> list[dict[str, Any]]:
    """What the run logged."""
    assert train(of, command="", started=time.time()) == 0
    return [json.loads(line) for line in pathlib.Path(of.run_dir, "metrics.jsonl").read_text().splitlines()]


def validation_loss(logged: list[dict[str, Any]]) -> float:
    return next(line["validation_loss"] for line in reversed(logged) if "validation_loss" in line)


def documents(home: pathlib.Path, name: str, sight: Any, of_line=conversation) -> list[Document]:
    """The conversations of a file of JSONL, rendered for this sight; of pairs both in turn."""
    model = home / "model"
    chats = Chats(ChatTemplate.load(model), Tokenizer.load(model), sight, home)
    lines = (home / f"{name}.jsonl").read_text().splitlines()
    return [document for line in lines for document in of_line(json.loads(line), name, chats)]


def log_probabilities(llm: LLM, asked: Sequence[Document]) -> list[np.ndarray]:
    """float [n - 1] of each document, of its tokens but the first."""
    sight, done = llm.engine.sight, {}
    for number, document in enumerate(asked):
        ids = document.ids.tolist()
        once = [id for place, id in enumerate(ids) if id != sight.vector or ids[place - 1] != id]
        pictures = [sight.prepare(pixels_of(image.file)) for image in document.images]
        expanded, placed = sight.expanded(once, pictures)
        assert list(expanded) == ids
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        llm.engine.add(str(number), expanded, params, pictures=placed)
    while len(done) < len(asked):
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return [np.array([place.chosen.logprob for place in done[str(n)].prompt_logprobs[1:]]) for n in range(len(asked))]


def learned_loss(llm: LLM, asked: Sequence[Document]) -> float:
    """Nats a token that is learned, as an engine reads the conversations."""
    scored = np.concatenate([d.learned[1:] for d in asked]).astype(bool)
    return -np.concatenate(log_probabilities(llm, asked))[scored].mean()
