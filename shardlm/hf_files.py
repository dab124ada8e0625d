"""Checkpoints as Hugging Face publishes them: a folder with config.json and one or several safetensors files
(https://huggingface.co/docs/safetensors). Knows files and bytes, no architectures. A slice is read without the rest of
its tensor."""

import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardlm.errors import ShardlmError
from shardlm.files import check_room
from shardlm.gguf_files import shards
from shardlm.gguf_files.choose import meant
from shardlm.gguf_files.header import Block
from shardlm.gguf_files.place import place
from shardlm.unread import BLOCK_BYTES, blocks

DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 10**9
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
BESIDE = (  # what a folder holds besides weights and config.json, in the names that transformers reads
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    "additional_chat_templates/*.jinja",
)
OF_IMAGES = ("preprocessor_config.json", "processor_config.json")  # what it says of preparing them
# What says how a checkpoint is quantised where config.json does not: ModelOpt, AutoGPTQ and AutoAWQ wrote it at first.
# Each with an option that it has in any case.
QUANTISATION = {
    "hf_quant_config.json": ("modelopt", "quant_algo"),
    "quantize_config.json": ("gptq", "bits"),
    "quant_config.json": ("awq", "w_bit"),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor in a file: bytes [begin, begin + size of the array)."""

    file: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A slice as an array of its own; of the file only its pages are touched.

        Raises ShardlmError where the file is gone or has become shorter: its map would end the process.
        """
        size, end = self.file.stat().st_size if self.file.exists() else 0, self.begin + self.nbytes
        if size < end:
            raise ShardlmError(
                f"{self.file} has become shorter since it was opened: a tensor ends at byte {end} and the file has "
                f"{size} bytes; download it again and start anew"
            )
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)[index]
        whole = np.memmap(self.file, self.dtype, "r", self.begin, self.shape or (1,))
        return np.array(whole[index] if self.shape else whole[0])


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
            raise ShardlmError(f"{path} is not a folder; give the folder that holds config.json and *.safetensors")
        config = read_config(path)
        behind = behind_it(config)
        return cls(path, config, shards.read(behind).tensors if behind else _tensors(path))


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
    return behind.exists() if behind else any(path.glob("*.safetensors"))


def read_config(path: pathlib.Path) -> Mapping[str, Any]:
    """config.json of a folder, with what a file of its own says of a quantisation."""
    path = home(path)
    if path.suffix.lower() == ".gguf" and not path.exists():
        raise ShardlmError(f"there is no file {path}; give the path of a file of llama.cpp")
    found = _json(path / "config.json", "the folder of a Hugging Face checkpoint holds one")
    for name, (method, option) in QUANTISATION.items():
        if "quantization_config" not in found and (path / name).is_file():
            told = _json(path / name, "")
            told = told.get("quantization", told)
            if isinstance(told, dict) and option in told:
                found["quantization_config"] = {"quant_method": method, **told}
    return found


def read_generation(path: pathlib.Path) -> Mapping[str, Any]:
    """generation_config.json of a folder; empty where there is none."""
    file = path / "generation_config.json"
    return _json(file, "") if file.is_file() else {}


def _json(file: pathlib.Path, why: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise ShardlmError(f"{file} is not there; {why}") from None
    except OSError as error:
        raise _unreadable(file, error) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ShardlmError(f"{file} holds a JSON {type(found).__name__} and not an object; download it again")
    return found


def _unreadable(file: pathlib.Path, error: OSError) -> ShardlmError:
    return ShardlmError(f"cannot read {file}: {error.strerror}; check what it is and its permissions")


def _tensors(path: pathlib.Path) -> dict[str, Stored]:
    """All tensors of a folder, from the files that transformers would read: model.safetensors, else those that the
    index names, else every one that is there."""
    if not (path / ONE).exists() and (path / INDEX).exists():
        return _indexed(path)
    files = [path / ONE] if (path / ONE).exists() else sorted(path.glob("*.safetensors"))
    if not files:
        found = "the weights are those files: download them too, or name the folder that has them"
        if others := pickled(file.name for file in path.iterdir()):
            found = in_place_of(others)
        raise ShardlmError(f"{path} holds no *.safetensors; {found}")
    _check_numbers(files)
    return _together((file, header(file)) for file in files)


def pickled(names: Iterable[str]) -> list[str]:
    """Of files' names those of PyTorch's own format."""
    return sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))


def in_place_of(names: Iterable[str]) -> str:
    """What to do with such files."""
    how = "transformers' AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) does"
    return f"{', '.join(names)} would run code on loading: save them as safetensors ({how})"


def _together(headers: Iterable[tuple[pathlib.Path, Mapping[str, Stored]]]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file, found in headers:
        for name, stored in found.items():
            if name in tensors:
                raise ShardlmError(f"{file}: tensor {name} is in {tensors[name].file.name} too; remove one of them")
            tensors[name] = stored
    return tensors


def _check_numbers(files: list[pathlib.Path]) -> None:
    """Files named -00001-of-00003 have to be three."""
    names = {file.name for file in files}
    for match in filter(None, (re.fullmatch(r"(.*)-(\d+)-of-(\d+)\.safetensors", file.name) for file in files)):
        stem, number, total = match.groups()
        for i in range(1, int(total) + 1):
            expected = f"{stem}-{i:0{len(number)}}-of-{total}.safetensors"
            if expected not in names:
                raise ShardlmError(
                    f"{files[0].parent} holds {match[0]}, of {int(total)} files, and not {expected}; download it too"
                )


def _indexed(path: pathlib.Path) -> dict[str, Stored]:
    index = path / INDEX
    places = _json(index, "").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ShardlmError(f"{index} has no weight_map from tensors to files; download it again")
    names = sorted(set(places.values()))
    for name in names:
        if pathlib.PurePath(name).name != name:
            raise ShardlmError(f"{index} names {name}, which is not a file of {path}; download it again")
        if not (path / name).exists():
            raise ShardlmError(f"{index} names {name}, which is not in {path}; download it too")
    tensors = _together((path / name, header(path / name)) for name in names)
    for name, file in places.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ShardlmError(f"{index} says that {name} is in {file}, and it is not; download both again")
    return tensors


def header(file: pathlib.Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, each checked to lie inside it, beside the others."""
    try:
        size, opened = file.stat().st_size, open(file, "rb")  # noqa: SIM115
    except OSError as error:
        raise _unreadable(file, error) from None
    with opened as stream:
        first = stream.read(8)
        if first.startswith(b"version "):
            raise ShardlmError(f"{file} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        length = int.from_bytes(first, "little")
        if len(first) < 8 or not 0 < length <= size - 8:
            of_header = f"its header alone has {8 + length}" if len(first) == 8 else "the length of its header takes 8"
            raise ShardlmError(
                f"{file} is {'not a safetensors file or is cut off' if size else 'empty'}: it has {size} bytes, and "
                f"{of_header}; download it again"
            )
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, TypeError):
            raise ShardlmError(f"{file}: the header is damaged; download the file again") from None
    tensors = {name: _stored(file, name, entry, 8 + length, size) for name, entry in entries.items()}
    _check_places(file, tensors, 8 + length, size)
    return tensors


def _stored(file: pathlib.Path, name: str, entry: Mapping[str, Any], start: int, size: int) -> Stored:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(kind, str) and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ShardlmError(f"{file}: {name} is described by {json.dumps(entry)[:200]}; download the file again")
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise ShardlmError(
            f"{file}: {name} has dtype {kind}; supported: {', '.join(DTYPES)}; save the checkpoint in one of these"
        )
    stored = Stored(file, dtype, shape, start + begin)
    if end - begin != stored.nbytes:
        raise ShardlmError(
            f"{file}: {name} has {end - begin} bytes, and {kind}{list(shape)} needs {stored.nbytes}; download it again"
        )
    if start + end > size:
        raise ShardlmError(f"{file} is cut off: {name} ends at byte {start + end} of {size}; download it again")
    return stored


def _check_places(file: pathlib.Path, tensors: Mapping[str, Stored], start: int, size: int) -> None:
    """Tensors follow each other with nothing between and nothing after, as the format demands
    (https://github.com/huggingface/safetensors#format)."""
    end, before = start, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if stored.begin != end:
            fault = "overlaps" if stored.begin < end else "leaves a gap after"
            raise ShardlmError(
                f"{file}: {name} {fault} {before}: it begins at byte {stored.begin} and that ends at {end}; download "
                "the file again"
            )
        end, before = end + stored.nbytes, name
    if end != size:
        raise ShardlmError(f"{file} has {size} bytes and its tensors end at {end}; download the file again")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A tensor that is to be written; `make` gives its array when its turn comes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

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


def copy_beside(folder: pathlib.Path, output: pathlib.Path) -> None:
    """Tokenizer, templates and the like from one folder to another."""
    for pattern in BESIDE:
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
