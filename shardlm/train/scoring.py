"""The loss of a checkpoint on text or conversations, by the program that validates during training."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardlm.data.config import DataConfig
from shardlm.data.prepare import Progress, prepare
from shardlm.mesh import MeshSpec
from shardlm.opened import check_stands, describe, trained
from shardlm.precision import Precision
from shardlm.tokenizer import file_of
from shardlm.train.check import check_vocabulary
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.evaluate import Evaluator
from shardlm.train.program import Program
from shardlm.train.seeing import sight_of_chats
from shardlm.train.task import with_eyes
from shardlm.vision.trained import with_trained


def score(
    checkpoint: str | os.PathLike,
    text: Sequence[str],
    *,
    mesh: MeshSpec,
    seq_len: int,
    global_batch: int,
    precision: Precision | None = None,
    text_key: str = "text",
    chat_template: str = "",
    cache_dir: str = "data",
    ema: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Mapping[str, Any]:
    """Loss in nats a token, perplexity and bits per byte of a Hugging Face folder, adapters or a run on text files, cut
    into rows of seq_len tokens, and how many tokens that is. `precision` is the run's or fp32 by default; a run that
    was trained as what will be served in few bits is scored so.

    With `chat_template`, a folder or file, the files are conversations, with images too where the model sees: none is
    cut that a row holds, and the loss is that of what the template marks as to be learned, as in training. A run's
    images are as large as it trained on.

    Raises ShardlmError for whatever does not fit.
    """
    found = describe(checkpoint, seq_len)
    check_stands(found)
    kept = found.run.config_json if found.run else {}
    files = tuple(text)
    config = RunConfig(
        found.source,
        lora=found.lora,
        data=DataConfig(
            files,
            files,
            str(file_of(found.folder)),
            chat_template,
            text_key,
            kept.get("data", {}).get("max_pixels", 0) if chat_template else 0,
            "whole" if chat_template else "cut",
            cache_dir=cache_dir,
        ),
        mesh=mesh,
        precision=precision or kept.get("precision", "fp32"),
        matmul=found.scheme or "dtype",
        train=TrainConfig(global_batch=global_batch, seq_len=seq_len),
    )
    program = Program.make(config, mesh.build(), mtp=False)
    sight = sight_of_chats(config)
    data = prepare(config.data, progress, sight)
    check_vocabulary(program.model.config, data.tokenizer.vocab_size)
    program, eyes = with_eyes(program, data, sight)
    with jax.set_mesh(program.mesh):
        shapes = program.state_shapes().params
        params = trained(found, program.model, shapes, program.mesh, name="ema" if ema else "params")
        if program.seeing:
            eyes = with_trained(found, program.seeing.encoder, eyes, "ema" if ema else "params")
        evaluator = Evaluator(program, data, program.lower_eval().compile(), eyes)
        values = evaluator(params, program.frozen())
    names = {"validation_loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits_per_byte"}
    return {new: values[old] for old, new in names.items() if old in values} | {"tokens": data.validation.num_tokens}
