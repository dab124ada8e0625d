"""From a `DataConfig` to a tokenizer and token shards, once: later runs find both in the cache.

Owns the cache and its lock; reading is `corpus`'s, tokenising `writer`'s. The cache is keyed by the names,
sizes and times of the files and by every setting that changes the tokens.
"""

import contextlib
import dataclasses
import fcntl
import glob
import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from absl import logging

from shardlm.data import standard_library
from shardlm.data.chats import conversation, template_of, write_lines
from shardlm.data.config import DataConfig, OnBadUtf8
from shardlm.data.corpus import Document, Progress, Source, find_sources, read_documents
from shardlm.data.labelled import labelled, with_others
from shardlm.data.preferences import pair
from shardlm.data.rendering import Chats
from shardlm.data.shards import FORMAT, FORMAT_WITH_IMAGES, META, TokenShards, is_shards
from shardlm.data.writer import write_shards
from shardlm.errors import ShardlmError
from shardlm.hf_files import texts_beside
from shardlm.tokenizer import Tokenizer, file_of, train_bpe
from shardlm.vision.sight import Sight

# A tokenizer is trained on an even sample of about this much text.
_TRAINING_BYTES = 1 << 26
_PROBE = (600, 900)  # pixels of an image that some families cut into tiles


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a run needs. `tokenizer_path` is the file to keep beside a checkpoint; `train_sources` and
    `validation_sources` are by name the parts of the others, where data.weights tells them apart."""

    tokenizer: Tokenizer
    tokenizer_path: Path
    train: TokenShards
    validation: TokenShards
    train_sources: Mapping[str, TokenShards] = dataclasses.field(default_factory=dict)
    validation_sources: Mapping[str, TokenShards] = dataclasses.field(default_factory=dict)


def prepare(
    config: DataConfig, progress: Progress = lambda stage, done, total: None, sight: Sight | None = None
) -> Prepared:
    """Opens the shards that `config` names, or makes them from its text. `sight`: of the model in data.chat_template,
    prepared with data.max_pixels, by which conversations may have images.

    Of several processes on one host that ask for the same cache, one works and the others wait for it.

    Raises:
      ShardlmError: the data or the tokenizer are missing or bad, shards come from another tokenizer, or have images
        that the model does not see.
    """
    cache = Path(config.cache_dir)
    with _lock(cache):
        found = {
            name: {one: _shards_or_sources(paths, cache) for one, paths in config.apart(name).items()}
            for name in ("train", "validation")
        }
        train, validation = (list(each.values()) for each in found.values())
        home = cache / _key(config, sight, *train, *validation)
        tokenizer, path = _tokenizer(config, train, home, progress)
        if config.weights:
            opened = _each_alone(found, config, sight, tokenizer, progress)
        else:
            opened = {"train": {"": _open_or_write(*train, config, sight, tokenizer, home / "train", progress)}}
            opened["validation"] = opened["train"]
            if config.validation != config.train:  # which are the same where a checkpoint is scored
                made = _open_or_write(*validation, config, sight, tokenizer, home / "validation", progress)
                opened["validation"] = {"": made}
    for name, shards in ((name, shards) for name, each in opened.items() for shards in each.values()):
        if shards.tokenizer != tokenizer.fingerprint:
            raise ShardlmError(
                f"the shards of data.{name} ({', '.join(map(str, shards.directories))}) were made by another"
                f" tokenizer, of vocabulary {shards.vocab_size}, than {path}, of {tokenizer.vocab_size}: set"
                f" data.tokenizer={shards.directories[0] / 'tokenizer.json'}, or tokenise the text again"
            )
        if shards.image_token is not None and sight is None:
            raise ShardlmError(
                f"the shards of data.{name} ({', '.join(map(str, shards.directories))}) have images, and nothing says"
                " how they are seen: set data.chat_template to the folder of a model that sees"
            )
    whole = [TokenShards.join([*each.values()]) for each in opened.values()]
    return Prepared(tokenizer, path, *whole, *(opened.values() if config.weights else ()))


def _each_alone(found, config: DataConfig, sight: Sight | None, tokenizer: Tokenizer, progress: Progress):
    """Shards of each source by its name. Each has a place of its own in the cache, whatever it is mixed with."""
    opened = {}
    for name, each in found.items():
        opened[name] = {}
        for source, what in each.items():
            key = _key(config, sight, what, tokenizer=tokenizer.fingerprint)

            def of_source(stage: str, done: int, total: int, source: str = source) -> None:
                progress(f"{stage} {source}", done, total)

            directory = Path(config.cache_dir) / key / "source"
            opened[name][source] = _open_or_write(what, config, sight, tokenizer, directory, of_source)
    return opened


def tokenizer_from(
    spec: str,
    sources: Sequence[Source],
    *,
    text_key: str = "text",
    on_bad_utf8: OnBadUtf8 = "fail",
    progress: Progress = lambda stage, done, total: None,
) -> Tokenizer:
    """The tokenizer that `spec` names (a file, a folder, a file of llama.cpp), or for `bpe:N` one of N entries
    trained on `sources`.

    Raises:
      ShardlmError: `spec` is neither, or the text cannot be read.
    """
    if not spec.startswith("bpe:"):
        return Tokenizer.load(texts_beside(Path(spec)))
    if not (size := spec.removeprefix("bpe:")).isdecimal():
        raise ShardlmError(f"tokenizer {spec!r}: expected bpe: and a number of entries, such as bpe:4096")
    total = sum(source.size for source in sources)
    documents = read_documents(sources, text_key=text_key, on_bad_utf8=on_bad_utf8)
    return train_bpe(_sample(documents, total, progress), int(size))


def _sample(documents: Iterator[Document], total: int, progress: Progress) -> Iterator[str]:
    """Every document, or every k-th such that about `_TRAINING_BYTES` are read into the trainer."""
    every, done = max(1, round(total / _TRAINING_BYTES)), 0
    for index, document in enumerate(documents):
        done += document.size
        progress("training the tokenizer", done, total)
        if document.text and index % every == 0:
            yield document.text


def _shards_or_sources(paths: Sequence[str], cache: Path) -> TokenShards | tuple[Source, ...]:
    paths = [one for path in paths for one in _directories_of_shards(path) or [path]]
    made = [path for path in paths if is_shards(path)]
    if made and len(made) < len(paths):
        rest = [path for path in paths if path not in made]
        raise ShardlmError(
            f"token shards ({', '.join(made)}) and text ({', '.join(rest)}) in one dataset: tokenise the text"
            " with python -m launch.tokenize and the tokenizer.json of the shards first"
        )
    if made:
        return TokenShards.open(*made)
    if any(path in standard_library.NAMES for path in paths):
        directory = cache / f"stdlib-{platform.python_version()}"
        files = dict(zip(standard_library.NAMES, standard_library.materialise(directory), strict=True))
        paths = [str(files.get(path, path)) for path in paths]
    return find_sources(paths)


def _directories_of_shards(pattern: str) -> list[str]:
    """What a pattern matches, where that is shards and nothing else."""
    found = [] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    return found if all(map(is_shards, found)) else []


def _key(
    config: DataConfig, sight: Sight | None, *datasets: TokenShards | tuple[Source, ...], tokenizer: str = ""
) -> str:
    """`tokenizer`: its fingerprint, where it is known."""
    if not tokenizer:
        tokenizer = config.tokenizer
        if not tokenizer.startswith("bpe:"):
            tokenizer = Tokenizer.load(texts_beside(Path(tokenizer))).fingerprint
    inputs = [
        what.fingerprint if isinstance(what, TokenShards) else [source.identity for source in what] for what in datasets
    ]
    content = [FORMAT, tokenizer, config.text_key, config.on_bad_utf8, inputs]
    if config.chat_template:
        content.append(dataclasses.asdict(template_of(config.chat_template)))
    if config.packing in ("pairs", "labelled"):
        content.append(config.packing)
    if config.chat_template and sight is not None:
        # Of images only their names count, which the JSONL has: to look at millions of files takes longer than to open
        # what was made of them. An image that is another one under its old name is not noticed.
        content.append([FORMAT_WITH_IMAGES, *_options_of(sight)])
    content = msgspec.json.encode(content)
    return hashlib.sha256(content).hexdigest()[:16]


def _options_of(sight: Sight) -> list[Any]:
    """What decides the tokens of an image: the tokens of one are among it, as they come of functions."""
    picture = sight.prepare(np.zeros((*_PROBE, 3), np.uint8))
    joins = sorted([*pair, both] for pair, both in sight.joins.items())
    return [sight.token, sight.vector, repr(sight.prepare), list(sight.tokens(picture)), sight.sizes[-1], joins]


def _tokenizer(config: DataConfig, train: Sequence, home: Path, progress: Progress) -> tuple[Tokenizer, Path]:
    if not config.tokenizer.startswith("bpe:"):
        path = file_of(texts_beside(Path(config.tokenizer)))
        return Tokenizer.load(path), path
    if made := [what for what in train if isinstance(what, TokenShards)]:
        raise ShardlmError(
            f"data.tokenizer is {config.tokenizer}, but data.train is token shards, which have their"
            f" tokenizer already: set data.tokenizer={made[0].directories[0] / 'tokenizer.json'}"
        )
    path = home / "tokenizer.json"
    if not path.exists():
        tokenizer_from(
            config.tokenizer,
            [source for what in train for source in what],
            text_key=config.text_key,
            on_bad_utf8=config.on_bad_utf8,
            progress=progress,
        ).save(path)
    return Tokenizer.load(path), path


def _open_or_write(
    what: TokenShards | tuple[Source, ...],
    config: DataConfig,
    sight: Sight | None,
    tokenizer: Tokenizer,
    directory: Path,
    progress: Progress,
) -> TokenShards:
    if isinstance(what, TokenShards):
        return what
    if (directory / META).exists():
        return TokenShards.open(directory)
    total = sum(source.size for source in what)
    # Of sources with weights some may be texts beside chats, which are learned whole.
    texts = config.weights and config.packing in ("cut", "whole") and all(one.kind != "jsonl" for one in what)
    if config.chat_template and not texts:
        of_line = {"pairs": pair, "labelled": labelled}.get(config.packing, conversation)
        return write_lines(
            what,
            Chats(template_of(config.chat_template), tokenizer, sight),
            directory,
            of_line,
            progress=lambda done: progress("rendering chats", done, total),
            **({"among": with_others} if config.packing == "labelled" else {}),
        )
    if config.packing in ("pairs", "labelled"):
        raise ShardlmError(
            f"data.packing={config.packing} without data.chat_template: answers are rendered by the template of "
            "the chats that the model was tuned on; name its folder or file"
        )
    return write_shards(
        read_documents(what, text_key=config.text_key, on_bad_utf8=config.on_bad_utf8),
        tokenizer,
        directory,
        progress=lambda done: progress(f"tokenising {directory.name}", done, total),
    )


@contextlib.contextmanager
def _lock(cache: Path) -> Iterator[None]:
    """Holds the cache for this process, however it ends; waits while another one holds it."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = open(cache / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise ShardlmError(
            f"cannot write to the data cache {cache}: {error.strerror}. Set data.cache_dir to a directory"
            " that can be written"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logging.warning("waiting for another process to prepare the data in %s", cache)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
