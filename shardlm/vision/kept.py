"""A checkpoint whose language model was trained further, written whole: the part that sees as it was, and the names
that the checkpoint has for both."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardlm.hf_files import Folder, Planned, holds_weights
from shardlm.hf_quantised import OPTIONS, dequantised
from shardlm.models.naming import renamed
from shardlm.vision.registry import sees, sight_of

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Whole:
    """The checkpoint that a language model came from.

    config   its config.json, not quantised
    eyes     tensors of what sees, by name
    layers   what the names of the language model's tensors begin with
    head     what its output head is called
    """

    config: Mapping[str, Any]
    eyes: Mapping[str, Any]
    layers: str
    head: str

    def named(self, text: Planned) -> Planned:
        """A tensor of the language model written alone, as the whole checkpoint calls it."""
        if text.name == HEAD:
            return dataclasses.replace(text, name=self.head)
        return dataclasses.replace(text, name=self.layers + text.name.removeprefix("model."))

    def planned(self, dtype: np.dtype) -> Iterator[Planned]:
        """What sees, in `dtype`."""
        for name, stored in self.eyes.items():
            yield Planned(name, np.dtype(dtype), tuple(stored.shape), functools.partial(_read, stored, dtype))


def whole(folder: pathlib.Path, options: Mapping[str, Any]) -> Whole | None:
    """Of a checkpoint by its config.json; None where it doesn't see, or is not in the folder any more."""
    if not sees(options) or not holds_weights(folder):
        return None
    tensors = sight_of(folder, options).encoder.tensors
    opened = Folder.open(folder)
    stored = dequantised(opened.tensors, opened.config)
    eyes = {n: one for n, one in stored.items() if renamed(n, tensors.renames).startswith(tensors.prefixes)}
    rest = [name for name in stored if name not in eyes]
    embedding = min((name for name in rest if name.endswith(EMBEDDING)), key=len)
    head = next((name for name in rest if name.endswith(HEAD)), HEAD)
    config = {name: value for name, value in options.items() if name not in OPTIONS}
    return Whole(config, eyes, embedding.removesuffix(EMBEDDING), head)


def _read(stored: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(stored.read(...)).astype(dtype)
