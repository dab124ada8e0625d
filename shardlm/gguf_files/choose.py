"""Which GGUF file is meant where there may be several: in a folder, or in a list of names."""

import pathlib
import re
from collections.abc import Iterable

from shardlm.errors import ShardlmError
from shardlm.gguf_files.header import BLOCKS, is_gguf

# Names of files of weights that are opened before those of llama.cpp in a folder.
SAFE, BY_TORCH = "*.safetensors", "pytorch_model*.bin"
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$", re.IGNORECASE)
_KINDS = "|".join(sorted(BLOCKS, key=len, reverse=True))
_TAG = re.compile(rf"(?:^|[-._/])((?:{_KINDS}|IQ\d_[A-Z]+)(?:_[A-Z]+)*)(?=[-._/]|$)", re.IGNORECASE)


def models(names: Iterable[str]) -> list[str]:
    """Of names of files those that a model is opened by: *.gguf, of several files the first, without the halves of
    models that see and statistics."""
    found = [name for name in names if name.lower().endswith(".gguf")]
    found = [name for name in found if not re.search(r"mmproj|imatrix", name.rsplit("/", 1)[-1], re.IGNORECASE)]
    return sorted(name for name in found if (part := _PART.search(name)) is None or part[1] == "00001")


def tag(name: str) -> str:
    """How a file's model is quantised, by its name, as Q4_K_M; "" where it does not say."""
    found = _TAG.findall(re.sub(r"\.gguf$", "", _PART.sub(".gguf", name), flags=re.IGNORECASE))
    return found[-1].upper() if found else ""


def tagged(names: Iterable[str], wanted: str) -> list[str]:
    """Those of this quantisation."""
    return [name for name in names if tag(name) == wanted.upper()]


def in_folder(folder: pathlib.Path) -> pathlib.Path | None:
    """The one model in GGUF that a folder without other weights holds; None where it holds none. Raises ShardlmError
    where it holds several."""
    if any(any(folder.glob(pattern)) for pattern in (SAFE, BY_TORCH)):
        return None
    found = models(path.name for path in folder.iterdir() if path.is_file())
    if len(found) > 1:
        raise ShardlmError(f"{folder} holds several models, {', '.join(found)}; give the path of one of them")
    return folder / found[0] if found else None


def meant(path: pathlib.Path) -> pathlib.Path | None:
    """The GGUF file that a path names: a file, by its name or, as Ollama's have none, by how it begins, or the only one
    in a folder; None: it is neither."""
    if path.is_dir():
        return in_folder(path)
    return path if path.is_file() and (path.suffix.lower() == ".gguf" or is_gguf(path)) else None
