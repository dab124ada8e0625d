"""Tokenizers of folders that have no tokenizer.json: vocab.json with merges.txt (GPT-2's form), tokenizer.model
(SentencePiece's, or tiktoken's as Llama 3 was published), tekken.json, tiktoken.model and *.tiktoken. Each is written
down as the tokenizer.json that the `tokenizers` library reads. No jax, and none of the libraries that these files are
of."""

import functools
import pathlib
from collections.abc import Callable

from shardlm.errors import ShardlmError
from shardlm.tokenizer_files import byte_pairs, pieces, ranks, tekken
from shardlm.tokenizer_files.told import JSON, NAMES, told_in

FORMS = "tokenizer.json, vocab.json with merges.txt, tokenizer.model, tekken.json, tiktoken.model or *.tiktoken"


def is_here(folder: pathlib.Path) -> bool:
    """Whether a folder has a tokenizer of any form."""
    return (folder / JSON).is_file() or _reader(folder) is not None


def stamps(folder: pathlib.Path) -> tuple[tuple[str, int, int], ...]:
    """What changes with the files that a folder's tokenizer is made of, of which tokenizer.json is none."""
    files = [file for name in NAMES for file in sorted(folder.glob(name))]
    return tuple((str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)


def tokenizer_json(folder: pathlib.Path) -> str:
    """A tokenizer.json with the ids and the cuts of a folder's tokenizer, made of its other files.

    Raises:
      ShardlmError: there is none, it is of a kind that is not supported, or files are damaged or disagree.
    """
    return _made(folder, stamps(folder))


@functools.lru_cache(maxsize=2)  # a vocabulary takes seconds, and is asked for several times
def _made(folder: pathlib.Path, stamped: tuple) -> str:
    del stamped
    reader = _reader(folder)
    if reader is None:
        lacking = byte_pairs.lacking(folder)
        raise ShardlmError(f"no tokenizer in {folder}: it needs {FORMS}{lacking}. Put the model's own there")
    return reader(folder, told_in(folder))


def _reader(folder: pathlib.Path) -> Callable | None:
    """The first of the forms that is there, in the order in which transformers asks for them."""
    if (folder / ranks.KIMI).is_file() or any(folder.glob(ranks.QWEN)):
        return ranks.read
    if (folder / pieces.FILE).is_file():
        return ranks.read if ranks.is_ranks(folder / pieces.FILE) else pieces.read
    if (folder / tekken.FILE).is_file():
        return tekken.read
    return byte_pairs.read if byte_pairs.is_here(folder) else None
