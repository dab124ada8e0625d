"""Opening a GGUF file makes a small folder in the user's cache that stands for it: config.json and what tokenizers and
templates are read from, in Hugging Face's form. Weights stay in the file, which config.json names."""

import hashlib
import json
import os
import pathlib
import shutil
import tempfile

from shardlm.errors import ShardlmError
from shardlm.files import free_space, user_cache
from shardlm.gguf_files import shards
from shardlm.gguf_files.config import config
from shardlm.gguf_files.texts import texts

FORMAT = 1  # to be raised with every change of what is written from the same file


def cache() -> pathlib.Path:
    """Where such folders are: XDG_CACHE_HOME/shardlm/gguf, of which the first is ~/.cache by default."""
    return user_cache("gguf", "the small folder may be that opening a file of llama.cpp makes")


def place(file: str | os.PathLike) -> pathlib.Path:
    """The folder that stands for a GGUF file, or for one of a model's several. Raises ShardlmError for what is not
    supported or damaged, and where the cache cannot be written."""
    stamped = shards.stamps(pathlib.Path(file))
    digest = hashlib.sha256(repr((FORMAT, stamped)).encode()).hexdigest()[:24]
    folder = cache() / digest
    if not (folder / "config.json").is_file():
        gguf = shards.read(file)
        try:
            contents = _contents(gguf, stamped[0][0])
        except ShardlmError as error:
            raise ShardlmError(f"{file}: {error}") from None
        _write(folder, contents)
    return folder


def _contents(gguf: shards.Gguf, file: str) -> dict[str, str]:
    options = config(gguf) | {"quantization_config": {"quant_method": "gguf", "file": file}}
    return texts(gguf.metadata) | {"config.json": json.dumps(options, indent=2) + "\n"}


def _write(folder: pathlib.Path, contents: dict[str, str]) -> None:
    """All at once: another process may be about the same."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = pathlib.Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
        draft.chmod(0o755)  # other users may share the cache
        try:
            for name, text in contents.items():
                (draft / name).parent.mkdir(exist_ok=True)
                (draft / name).write_text(text, encoding="utf-8")
            draft.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    except OSError as error:
        raise ShardlmError(
            f"opening a file of llama.cpp makes a small folder, and {folder} cannot be written: "
            f"{error.strerror or error} ({free_space(cache())}); set XDG_CACHE_HOME to a folder that can be"
        ) from error
