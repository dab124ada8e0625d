"""What a run reads. Owns the fields and their checks; `prepare` acts on them."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

from shardlm.errors import ShardlmError

OnBadUtf8 = Literal["fail", "replace", "skip"]
Packing = Literal["cut", "whole", "pairs", "labelled"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text or shards of a run, their tokenizer, and how documents fill rows.

    Each entry of `train` and `validation` is a file, a directory, a glob, `stdlib:train`, `stdlib:validation`
    (the running Python's own standard library), or a directory made by `launch.tokenize`.
    """

    train: tuple[str, ...] = ("stdlib:train",)
    validation: tuple[str, ...] = ("stdlib:validation",)
    tokenizer: str = "bpe:4096"  # a file or a folder with one, or bpe:N to train one of N entries on `train`
    chat_template: str = ""  # chats.py: conversations in JSONL, by a template in this folder or file; "": text
    text_key: str = "text"  # the JSONL key or Parquet column that holds the text
    max_pixels: int = 0  # of an image, of models whose folder may say it (Qwen's); 0: as that says
    # cut: documents may be cut; whole: only what exceeds a row; pairs, of answers, and labelled ones: none
    packing: Packing = "cut"
    on_bad_utf8: OnBadUtf8 = "fail"
    cache_dir: str = "data"
    seed: int = 0  # of the order of rows
    weights: tuple[float, ...] = ()  # of each entry of `train`, its share of the tokens; (): all, one after the other

    def __post_init__(self):
        for name in ("train", "validation"):
            if not getattr(self, name):
                raise ShardlmError(f"data.{name} is empty: name at least one file, directory, glob or stdlib:{name}")
        if self.max_pixels < 0:
            raise ShardlmError(f"data.max_pixels is {self.max_pixels}: give a number of pixels, or 0")
        if not 0 <= self.seed < 2**32:
            raise ShardlmError(f"data.seed is {self.seed}: it must be from 0 to 2**32 - 1")
        if self.weights:
            self._check_weights()

    def _check_weights(self) -> None:
        if len(self.weights) != len(self.train):
            raise ShardlmError(
                f"data.weights={self.weights} are {len(self.weights)} for the {len(self.train)} entries of data.train "
                f"({', '.join(self.train)}): give one for each; an entry may be a directory or a glob in quotes"
            )
        if bad := [weight for weight in self.weights if not 0 < weight < math.inf]:
            raise ShardlmError(f"data.weights has {bad[0]}: each is above 0; leave out what is not to be trained on")
        for name, paths in (("train", self.train), ("validation", self.validation)):
            if twice := [path for path in paths if paths.count(path) > 1]:
                raise ShardlmError(f"data.{name} has {twice[0]} twice beside data.weights: name it once")

    def apart(self, name: Literal["train", "validation"]) -> dict[str, tuple[str, ...]]:
        """The entries that are one dataset each, by name: with weights each entry alone, otherwise all of them."""
        paths = getattr(self, name)
        return {one: (path,) for one, path in zip(names_of(paths), paths, strict=True)} if self.weights else {"": paths}


def names_of(paths: Sequence[str]) -> list[str]:
    """What files, directories and globs that differ are called: the fewest last parts of each by which they do."""
    parts = [PurePath(path).parts or (path,) for path in paths]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
