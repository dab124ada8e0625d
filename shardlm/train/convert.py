"""Checkpoints from one form to the other: a run's as a Hugging Face folder, and back, with tokenizer and templates."""

import dataclasses
import json
import os
import pathlib

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm import chat, hf_files, peft, weights
from shardlm.checkpoint import CheckpointConfig, Checkpoints
from shardlm.config_json import to_json
from shardlm.errors import ShardlmError
from shardlm.merge import merged
from shardlm.models import registry
from shardlm.models.pretrained import Pretrained
from shardlm.opened import DTYPES, Opened, describe, load
from shardlm.progress_bar import bytes_bar, waiting
from shardlm.run_files import CHECKPOINTS, find_run, save_run_files
from shardlm.state import is_adapter
from shardlm.tokenizer import Tokenizer
from shardlm.train.config import RunConfig, TrainConfig


def to_hf(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    dtype: str = "bfloat16",
    *,
    shard_bytes: int = hf_files.SHARD_BYTES,
    ema: bool = False,
    merge: bool = False,
) -> None:
    """A checkpoint as a folder that `transformers` opens; of adapters, one that PEFT opens, or with `merge` their sum
    with the weights that they stand on. Raises ShardlmError for a model that Hugging Face has no architecture for, and
    where `output` exists."""
    if dtype not in DTYPES:
        raise ShardlmError(f"dtype={dtype!r}; choose from {', '.join(DTYPES)}")
    # Sums of weights and adapters are rounded as weights are held: in full where that is asked for.
    held = "float32" if merge and dtype == "float32" else None
    opened = load(checkpoint, dtype=held, ema=ema, mtp=True)
    if opened.model.execution.lora.rank:
        if not merge:
            _adapters_to_hf(opened, pathlib.Path(output))
            return
        with jax.set_mesh(opened.mesh):
            model, params = merged(opened.model, opened.params)
        opened = dataclasses.replace(opened, model=model, params=params)
    if not hasattr(opened.source, "to_hf"):
        raise ShardlmError(f"a {type(opened.source).__name__} has no architecture on Hugging Face")
    config = {**opened.source.to_hf(), "dtype": dtype}
    beside = opened.folder
    if isinstance(opened.source, Pretrained):
        if (folder := hf_files.home(pathlib.Path(opened.source.folder))).is_dir():
            beside = folder  # templates and the like, beside the same tokenizer
    else:
        config |= _end_of_document(opened.folder)
        config["max_position_embeddings"] = find_run(opened.folder).config_json["train"]["seq_len"]

    def names(block):
        return registry.names(config, opened.model.config, block)

    planned = list(weights.planned(opened.model.config, opened.params, names, jnp.dtype(DTYPES[dtype])))
    with jax.set_mesh(opened.mesh), bytes_bar("writing weights") as progress:
        hf_files.write_folder(output, planned, config, beside, shard_bytes, progress)
    if (opened.folder / chat.FILE).exists():  # of a run that trained on chats
        chat.ChatTemplate.load(opened.folder).save(output)
    described = pathlib.Path(output) / "tokenizer_config.json"
    if (opened.folder / "tokenizer.json").exists() and not described.exists():
        described.write_text(json.dumps(_tokenizer_config(opened.folder), indent=2) + "\n")


def _adapters_to_hf(opened: Opened, output: pathlib.Path) -> None:
    adapters = {path: a for path, a in flatten_dict(opened.params).items() if is_adapter(path)}
    peft.save(output, opened.model, unflatten_dict(adapters), opened.source)
    hf_files.copy_beside(hf_files.home(pathlib.Path(opened.source.folder)), output)
    if (opened.folder / chat.FILE).exists():
        chat.ChatTemplate.load(opened.folder).save(output)


def to_run(checkpoint: str | os.PathLike, output: str | os.PathLike) -> None:
    """A Hugging Face folder as a run of shardlm with one checkpoint, step 0, in float32. Raises ShardlmError where
    `output` exists."""
    run_dir = pathlib.Path(output)
    if run_dir.exists():
        raise ShardlmError(f"{run_dir} exists; choose another output folder or remove it")
    opened = load(checkpoint, dtype="float32", mtp=True)
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(opened.source.options.get("dtype"), "fp32")
    tokenizer = opened.folder / "tokenizer.json"
    checkpointing = Checkpoints(run_dir / CHECKPOINTS, CheckpointConfig())
    with jax.set_mesh(opened.mesh), waiting("writing the checkpoint"), checkpointing as checkpoints:
        checkpoints.save(0, {"params": opened.params}, {}, {})
    rows = min(TrainConfig().seq_len, describe(checkpoint).longest or TrainConfig().seq_len)
    config = RunConfig(opened.source, precision=precision, train=TrainConfig(seq_len=rows), run_dir=str(run_dir))
    save_run_files(run_dir, to_json(config), tokenizer if tokenizer.exists() else None)
    hf_files.copy_beside(opened.folder, run_dir)


def _end_of_document(folder: pathlib.Path) -> dict[str, int]:
    """For config.json, of a tokenizer that shardlm trained or copied."""
    if not (folder / "tokenizer.json").exists():
        return {}
    return {"eos_token_id": Tokenizer.load(folder).end_of_document_id}


def _tokenizer_config(folder: pathlib.Path) -> dict[str, str]:
    """tokenizer_config.json of a tokenizer.json that has none."""
    tokenizer = Tokenizer.load(folder)
    name = tokenizer.decode([tokenizer.end_of_document_id], skip_special=False)
    return {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": name}
