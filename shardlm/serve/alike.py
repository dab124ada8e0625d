"""What must be the same in all processes of one engine: what was asked for, before minutes go into weights, and what
was built."""

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from shardlm.gguf_files import shards
from shardlm.hf_files import behind_it, read_config
from shardlm.opened import Found, describe, find, is_hf
from shardlm.peft_folder import weights_of
from shardlm.weight_files import hold

CONFIGS = ("config.json", "adapter_config.json")
SAMPLES, SAMPLE = 16, 4096  # of a file, and bytes of each


def asked(config: Any, found: Found) -> dict[str, str]:
    """Of an EngineConfig and the model that was found. Folders may have other names on other hosts."""
    speculative = config.speculative_config
    draft = speculative.model if speculative else None
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options["speculative_config"] = dataclasses.replace(speculative, model=None) if draft else speculative
    adapters = {name: of_files(path) for name, path in options.pop("lora_modules").items()}
    return {
        **{name: str(value) for name, value in options.items()},
        "max_model_len": f"{config.max_model_len or found.longest}",
        "jax": jax.__version__,
        "the model's folder": ", ".join(digest(folder) for folder in _folders(found)),
        "lora_modules": repr(adapters),
        "the draft model's folder": of_files(draft) if draft else "none",
    }


def built(runner: Any) -> dict[str, str]:
    """Of a runner."""
    execution = runner.model.execution
    return {
        "the model": repr(runner.model.config),
        "the mesh": str(runner.spec),
        "dtype": str(execution.dtype),
        "weights": repr(execution.weights),
        "the cache": str(execution.kv_cache),
        "adapters": f"{execution.adapters} of rank {execution.lora.rank}",
        "drafts": repr(runner.proposer and runner.proposer.drafts),
        "sizes": repr(runner.config),
    }


def of_files(path: str | os.PathLike) -> str:
    """Digests of the folders that a path names. Raises ShardlmError where it names none."""
    if "speculators_model_type" in (_config(folder := find(path))):  # a head that drafts, and no model
        return digest(folder)
    return ", ".join(digest(folder) for folder in _folders(describe(path)))


def digest(folder: str | os.PathLike) -> str:
    """Of a folder's configuration and weights, or of the files of llama.cpp that it stands for: names and sizes,
    and some bytes from all over each of them."""
    said = hashlib.sha256()
    for path in _files(pathlib.Path(folder)):
        said.update(f"{path.name} {path.stat().st_size}\n".encode())
        for part in _parts(path):
            said.update(part)
    return said.hexdigest()[:16]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    if is_hf(folder) and (behind := behind_it(read_config(folder))):
        return shards.parts(behind)
    own = {*(folder / name for name in CONFIGS), weights_of(folder)}
    return sorted({path for path in own if path.is_file()} | {*hold(folder)})


def _config(folder: pathlib.Path) -> Mapping[str, Any]:
    return read_config(folder) if (folder / CONFIGS[0]).is_file() else {}


def _parts(path: pathlib.Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE) * i // (SAMPLES - 1))
            yield file.read(SAMPLE)


def _folders(found: Found) -> list[str | os.PathLike]:
    """Those that weights come from, a run's own files apart from its checkpoints'."""
    if found.run:
        return [found.folder]
    return [found.source.folder, *([found.adapters] if found.adapters else [])]
