"""Checkpoints as Hugging Face publishes them: a folder with config.json, weights (weight_files.py) and what lies beside
them; and how one is written, in safetensors. Knows files and bytes, no architectures."""

import dataclasses
import json
import os
import pathlib
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.files import check_room
from shardlm.gguf_files import shards
from shardlm.gguf_files.choose import meant
from shardlm.gguf_files.header import Block
from shardlm.gguf_files.place import place
from shardlm.safetensors_files import header as header
from shardlm.stored import DTYPES, Stored, read_json
from shardlm.unread import BLOCK_BYTES, blocks
from shardlm.weight_files import INDEX, ONE, hold, tensors

NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10**9
BESIDE = (  # what a folder holds besides weights and config.json, in the names that transformers reads
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "tiktoken.model", "*.tiktoken", "tekken.json", "chat_template.jinja"),
    *("chat_template.json", "generation_config.json", "additional_chat_templates/*.jinja"),
)
OF_IMAGES = ("preprocessor_config.json", "processor_config.json")  # what it says of preparing them
OF_VIDEOS = "video_preprocessor_config.json"
# What says how a checkpoint is quantised where config.json does not: ModelOpt, AutoGPTQ and AutoAWQ wrote it at first.
# Each with an option that it has in any case.
QUANTISATION = {
    "hf_quant_config.json": ("modelopt", "quant_algo"),
    "quantize_config.json": ("gptq", "bits"),
    "quant_config.json": ("awq", "w_bit"),
}


@dataclasses.dataclass(frozen=True)
class Folder:
    """An opened checkpoint."""

    path: pathlib.Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored | Block]

    @classmethod
    def open(cls, path: str | os.PathLike) -> "Folder":
        """Reads config.json and the headers of all weight files. Raises ShardlmError that names the file for whatever
        is missing or broken."""
        path = home(pathlib.Path(path))
        if not path.is_dir():
            raise ShardlmError(f"{path} is not a folder; give the folder that holds config.json and the weights")
        config = read_config(path)
        behind = behind_it(config)
        return cls(path, config, shards.read(behind).tensors if behind else tensors(path))


def home(path: pathlib.Path) -> pathlib.Path:
    """The folder that stands for a file of llama.cpp, or for a folder that holds one and nothing else; anything else
    as it is. Raises ShardlmError for such a file that cannot be opened."""
    file = meant(path)
    return place(file) if file else path


def texts_beside(path: pathlib.Path) -> pathlib.Path:
    """Where a tokenizer and templates are: `home`, but for a folder that has its own beside a file of llama.cpp."""
    own = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
    return path if own else home(path)


def behind_it(config: Mapping[str, Any]) -> pathlib.Path | None:
    """The GGUF file that holds the weights of a folder with this config.json; None: it holds them itself."""
    told = config.get("quantization_config")
    method, file = (told.get("quant_method"), told.get("file")) if isinstance(told, Mapping) else (None, None)
    return pathlib.Path(file) if method == "gguf" and isinstance(file, str) else None


def holds_weights(path: pathlib.Path) -> bool:
    """Whether a folder's weights are here, and not its config.json alone."""
    path = home(path)
    behind = behind_it(read_config(path)) if (path / "config.json").is_file() else None
    return behind.exists() if behind else bool(hold(path))


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    """config.json of a folder, with what a file of its own says of a quantisation."""
    path = home(path)
    if path.suffix.lower() == ".gguf" and not path.exists():
        raise ShardlmError(f"there is no file {path}; give the path of a file of llama.cpp")
    found = read_json(path / "config.json", "the folder of a Hugging Face checkpoint holds one")
    for name, (method, option) in QUANTISATION.items():
        if "quantization_config" not in found and (path / name).is_file():
            told = read_json(path / name, "")
            told = told.get("quantization", told)
            if isinstance(told, dict) and option in told:
                found["quantization_config"] = {"quant_method": method, **told}
    return found


def read_generation(path: pathlib.Path) -> Mapping[str, Any]:
    """generation_config.json of a folder; empty where there is none."""
    file = path / "generation_config.json"
    return read_json(file, "") if file.is_file() else {}


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor that is to be written; `make` gives its array when its turn comes. `rounds`: it is a projection, and is
    to be written in few bits."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]
    rounds: bool = False

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_folder(
    path: str | os.PathLike,
    tensors: Iterable[Planned],
    config: Mapping[str, Any],
    finish: Callable[[pathlib.Path], None] = lambda folder: None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """A checkpoint folder as transformers opens it, one tensor in memory at a time. `finish` adds what else belongs in
    it. It appears under its name when it is whole. `progress` is called with (bytes written, bytes to write).

    Raises ShardlmError where there is something already, or no room.
    """
    path = pathlib.Path(path)
    if path.exists():
        raise ShardlmError(f"{path} exists; choose another output folder or remove it")
    shards = _shards(tensors, shard_bytes)
    width = len(shards)
    files = [f"model-{i + 1:05d}-of-{width:05d}.safetensors" if width > 1 else ONE for i in range(width)]
    total, done = sum(tensor.nbytes for shard in shards for tensor in shard), 0
    unfinished = path.with_name(path.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    check_room(path, total)
    unfinished.mkdir(parents=True)
    for file, shard in zip(files, shards, strict=True):
        for tensor in write_file(unfinished / file, shard):
            done += tensor.nbytes
            progress(done, total)
    if width > 1:
        weights = {tensor.name: file for file, shard in zip(files, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weights}
        (unfinished / INDEX).write_text(json.dumps(index, indent=2))
    (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    finish(unfinished)
    unfinished.rename(path)


def copy_beside(folder: pathlib.Path, output: pathlib.Path, patterns: Iterable[str] = BESIDE) -> None:
    """Tokenizer, templates and the like from one folder to another."""
    for pattern in patterns:
        for file in folder.glob(pattern):
            copy = output / file.relative_to(folder)
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(file, copy)


def _shards(tensors: Iterable[Planned], shard_bytes: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def write_file(file: pathlib.Path, tensors: list[Planned]) -> Iterator[Planned]:
    """Writes one safetensors file as far as it is iterated, one tensor in memory at a time; yields each that is in."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        entries[tensor.name] = entry | {"data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            array = tensor.make()
            assert array.shape == tensor.shape and array.dtype == tensor.dtype, (tensor, array.shape, array.dtype)
            for part in blocks(array.shape, BLOCK_BYTES // array.itemsize):  # one that is turned is copied
                stream.write(np.ascontiguousarray(array[part]).reshape(-1).view(np.uint8).data)
            yield tensor
