"""The loss of a checkpoint on text, by the program that validates during training."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from shardlm.checkpoint import Checkpoints
from shardlm.config_json import from_json
from shardlm.data.config import DataConfig
from shardlm.data.prepare import Progress, prepare
from shardlm.layers.lora import LoraConfig
from shardlm.mesh import MeshSpec
from shardlm.models.pretrained import Pretrained
from shardlm.opened import find, is_run
from shardlm.peft import base_of, is_peft, lora_of
from shardlm.peft import load as load_adapters
from shardlm.precision import Precision
from shardlm.run_files import find_run
from shardlm.train.check import check_vocabulary
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.train.evaluate import Evaluator
from shardlm.train.program import Program


def score(
    checkpoint: str | os.PathLike,
    text: Sequence[str],
    *,
    mesh: MeshSpec,
    seq_len: int,
    global_batch: int,
    precision: Precision | None = None,
    text_key: str = "text",
    cache_dir: str = "data",
    ema: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Mapping[str, Any]:
    """Loss in nats a token, perplexity and bits per byte of a Hugging Face folder, adapters or a run on text files, cut
    into rows of seq_len tokens, and how many tokens that is. `precision` is the run's or fp32 by default.

    Raises ShardlmError for whatever does not fit.
    """
    folder = find(checkpoint)
    files, lora, home = None, LoraConfig(), folder
    if is_run(folder):
        files = find_run(folder)
        source, home = from_json(Any, files.config_json["model"]), files.run_dir
        lora = from_json(LoraConfig, files.config_json["lora"]) if "lora" in files.config_json else lora
    elif is_peft(folder):
        base = find(base_of(folder))
        source, home = Pretrained(str(base), seq_len).pinned(), folder if (folder / "tokenizer.json").exists() else base
        lora = lora_of(folder, source)
    else:
        source = Pretrained(str(folder), seq_len).pinned()
    kept = files.config_json["precision"] if files else "fp32"
    tokenizer = home / "tokenizer.json"
    config = RunConfig(
        source,
        lora=lora,
        data=DataConfig(tuple(text), tuple(text), str(tokenizer), text_key=text_key, cache_dir=cache_dir),
        mesh=mesh,
        precision=precision or kept,
        train=TrainConfig(global_batch=global_batch, seq_len=seq_len),
    )
    program = Program.make(config, mesh.build())
    data = prepare(config.data, progress)
    check_vocabulary(program.model.config, data.tokenizer.vocab_size)
    with jax.set_mesh(program.mesh):
        frozen = program.frozen()
        if files:
            with Checkpoints(files.checkpoints_dir) as reader:
                params = reader.restore_params(program.state_shapes().params, files.step, "ema" if ema else "params")
        else:
            params = load_adapters(program.model, folder, source, program.mesh) if lora.rank else program.pretrained()
        evaluator = Evaluator(program, data, program.lower_eval().compile())
        values = evaluator(params, frozen)
    names = {"validation_loss": "loss", "perplexity": "perplexity", "bits_per_byte": "bits_per_byte"}
    return {new: values[old] for old, new in names.items()} | {"tokens": data.validation.num_tokens}
