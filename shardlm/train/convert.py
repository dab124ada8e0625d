"""Checkpoints from one form to the other: a run's as a Hugging Face folder, and back, with tokenizer and templates.
A model may be larger than memory: what is read of it is written before more is read."""

import functools
import json
import logging
import os
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp

from shardlm import chat, hf_files, peft, peft_folder, tokenizer_files, weights
from shardlm.checkpoint import Checkpoints, save_unread
from shardlm.config_json import to_json
from shardlm.errors import ShardlmError
from shardlm.execution import DTYPES
from shardlm.hf_quantised import gguf, supported
from shardlm.merge import merged
from shardlm.models import registry
from shardlm.models.naming import apart
from shardlm.models.pretrained import Pretrained
from shardlm.opened import BESIDE, Prepared, prepare, trained
from shardlm.progress_bar import bytes_bar
from shardlm.run_files import CHECKPOINTS, save_run_files
from shardlm.state import at_rest
from shardlm.tokenizer import Tokenizer, file_of
from shardlm.train.config import RunConfig, TrainConfig
from shardlm.vision import kept
from shardlm.vision.registry import sees
from shardlm.vision.trained import part_of
from shardlm.written_few_bits import in_few_bits

log = logging.getLogger(__name__)


def to_hf(
    checkpoint: str | os.PathLike,
    output: str | os.PathLike,
    dtype: str = "bfloat16",
    *,
    shard_bytes: int = hf_files.SHARD_BYTES,
    ema: bool = False,
    merge: bool = False,
    quantization: str = "",
) -> None:
    """A checkpoint as a folder that `transformers` opens, with what sees where it began with one that does and that is
    still there; of adapters, one that PEFT opens, or with `merge` their sum with the weights that they stand on.
    `quantization`: a scheme (ops/schemes.py) by which projections are written in few bits, from float32.
    Raises ShardlmError for a model that Hugging Face has no architecture for, and where `output` exists."""
    if dtype not in DTYPES:
        raise ShardlmError(f"dtype={dtype!r}; choose from {', '.join(DTYPES)}")
    # Sums of weights and adapters are rounded as weights are held: in full where that is asked for.
    held = "float32" if quantization or (merge and dtype == "float32") else None
    opened = prepare(checkpoint, dtype=held, mtp=True)
    name, source = "ema" if ema else "params", opened.found.source
    if quantization:
        _check_quantised(opened, merge, dtype)
    if opened.found.lora.rank and not merge:
        _refuse_encoder(opened, checkpoint)
        _adapters_to_hf(opened, name, pathlib.Path(output))
        return
    if not hasattr(source, "to_hf"):
        raise ShardlmError(f"a {type(source).__name__} has no architecture on Hugging Face")
    config, folder, seeing = {**source.to_hf(), "dtype": dtype}, opened.found.folder, None
    beside = folder
    if isinstance(source, Pretrained):
        seeing = _encoder(opened, source, name, output)
        if (own := hf_files.home(pathlib.Path(source.folder))).is_dir():
            beside = own  # templates and the like, beside the same tokenizer
    else:
        config |= _end_of_document(folder)
        config["max_position_embeddings"] = opened.found.run.config_json["train"]["seq_len"]

    def names(block):
        found = registry.names(config, opened.model.config, block)
        return apart(found) if quantization else found

    written, trained = jnp.dtype(DTYPES[dtype]), opened.found.scheme
    few = in_few_bits(quantization, opened.model.config, names, trained) if quantization else None
    planned = weights.planned(opened.model.config, _unread(opened, name), names, written, few.rounds if few else ())
    if seeing:
        planned = seeing.planned(planned, written, one_by_one=few is not None)
        config = {**seeing.config, "dtype": dtype}
    if few:
        planned = list(planned)
        config["quantization_config"] = few.options(planned, seeing.eyes if seeing else ())
        planned = few.tensors(planned)
    elif trained:
        log.warning("%s was trained as what --quantization=%s writes; this is what is rounded", checkpoint, trained)
    with bytes_bar("writing weights") as progress:
        finish = functools.partial(_texts_beside, folder, beside, bool(seeing))
        hf_files.write_folder(output, planned, config, finish, shard_bytes, progress)


def _refuse_encoder(opened: Prepared, checkpoint: str | os.PathLike) -> None:
    if (part := part_of(opened.found)) != "frozen":
        raise ShardlmError(
            f"{checkpoint} has adapters beside an encoder of images that was trained (train.encoder={part}), and a "
            "folder of PEFT has adapters alone; write both whole (--merge)"
        )


def _encoder(opened: Prepared, source: Pretrained, name: str, output: str | os.PathLike) -> kept.Whole | None:
    """What sees of the checkpoint that the model began with, as it was trained; None where there is nothing, or nothing
    any more, which is said."""
    seeing = kept.whole(hf_files.home(pathlib.Path(source.folder)), source.options)
    if seeing:
        return kept.as_trained(seeing, opened.found, name)
    if sees(source.options):
        why = f"the encoder of images is in {source.folder}, which has no weights now"
        log.warning("%s has the text alone, as %s", output, why)
    return None


def _texts_beside(folder: pathlib.Path, beside: pathlib.Path, sees: bool, written: pathlib.Path) -> None:
    """What a folder has beside its weights: templates and the like from `beside`, tokenizer and the template of a run
    that trained on chats from `folder`."""
    hf_files.copy_beside(beside, written)
    if sees:
        hf_files.copy_beside(beside, written, (*hf_files.OF_IMAGES, hf_files.OF_VIDEOS))
    if (folder / chat.FILE).exists():
        chat.ChatTemplate.load(folder).save(written)
    described = written / "tokenizer_config.json"
    if (folder / "tokenizer.json").exists() and not described.exists():
        described.write_text(json.dumps(_tokenizer_config(folder), indent=2) + "\n")


def _check_quantised(opened: Prepared, merge: bool, dtype: str) -> None:
    """Refuses what is not written in few bits, with what to do."""
    found = opened.found
    if found.lora.rank and not merge:
        raise ShardlmError("--quantization of adapters: they stay as they are; add them into the weights (--merge)")
    of_file = isinstance(found.source, Pretrained) and not found.run and not found.lora.rank
    method = supported(found.source.options) if of_file else ""
    if method and not ((file := hf_files.behind_it(found.source.options)) and gguf.in_full(file)):
        raise ShardlmError(
            f"--quantization: {found.source.folder} is in few bits already ({method}); write one that is in 16 bits, "
            "or serve this one as it is"
        )
    if dtype == "float16":
        raise ShardlmError(
            "--quantization with --dtype=float16: scales are bfloat16 and float32; choose bfloat16 or float32"
        )


def _unread(opened: Prepared, name: str) -> Any:
    """The weights of a model, with its adapters in them where it has any: a slice at a time is in memory, and all of
    the adapters."""
    found, model = opened.found, opened.model
    if found.run and not found.lora.rank:
        with Checkpoints(found.run.checkpoints_dir) as reader:
            # Of modules that predict further tokens as many are read as the model has.
            return reader.unread_params(model.shapes, found.run.step, name, optional=BESIDE)
    base = weights.unread(model, hf_files.Folder.open(found.source.folder), model.held_at_rest(opened.mesh))
    return merged(model, base, _adapters(opened, name)) if found.lora.rank else base


def _adapters(opened: Prepared, name: str) -> Any:
    shapes = jax.tree.map(lambda s: at_rest(s, opened.mesh), opened.model.shapes)
    return trained(opened.found, opened.model, shapes, opened.mesh, name=name)


def _adapters_to_hf(opened: Prepared, name: str, output: pathlib.Path) -> None:
    found = opened.found
    peft.save(output, opened.model, _adapters(opened, name), found.source)
    hf_files.copy_beside(hf_files.home(pathlib.Path(found.source.folder)), output)
    if (found.folder / chat.FILE).exists():
        chat.ChatTemplate.load(found.folder).save(output)


def opened_by(folder: pathlib.Path) -> str:
    """The class of transformers, or of PEFT, that opens what was written."""
    if peft_folder.is_peft(folder):
        return "AutoPeftModelForCausalLM"
    return "AutoModelForImageTextToText" if sees(hf_files.read_config(folder)) else "AutoModelForCausalLM"


def to_run(checkpoint: str | os.PathLike, output: str | os.PathLike) -> None:
    """A Hugging Face folder as a run of shardlm with one checkpoint, step 0, in float32. Raises ShardlmError where
    `output` exists."""
    run_dir = pathlib.Path(output)
    if run_dir.exists():
        raise ShardlmError(f"{run_dir} exists; choose another output folder or remove it")
    opened = prepare(checkpoint, dtype="float32", mtp=True)
    found, params = opened.found, _unread(opened, "params")
    unfinished = run_dir.with_name(f"{run_dir.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with bytes_bar("writing the checkpoint") as progress:
        save_unread(unfinished / CHECKPOINTS, 0, {"params": params}, progress)
    precision = {"bfloat16": "bf16", "float16": "fp16"}.get(found.source.options.get("dtype"), "fp32")
    rows = min(TrainConfig().seq_len, found.longest or TrainConfig().seq_len)
    config = RunConfig(found.source, precision=precision, train=TrainConfig(seq_len=rows), run_dir=str(run_dir))
    tokenizer = file_of(found.folder) if tokenizer_files.is_here(found.folder) else None
    save_run_files(unfinished, to_json(config), tokenizer)
    hf_files.copy_beside(found.folder, unfinished)
    unfinished.rename(run_dir)


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
