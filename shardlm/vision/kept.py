"""A checkpoint whose language model was trained further, written whole: the part that sees as it was, and the names
that the checkpoint has for both."""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from shardlm.hf_files import Folder, Planned, holds_weights
from shardlm.hf_quantised import OPTIONS, dequantised
from shardlm.mesh import MeshSpec
from shardlm.models.expert_tensors import together
from shardlm.opened import Found
from shardlm.stored import Stored
from shardlm.text_names import text_name
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sees, sight_of
from shardlm.vision.trained import Make, in_map, part_of, trained_tensors

EMBEDDING = "embed_tokens.weight"


@dataclasses.dataclass(frozen=True)
class Whole:
    """The checkpoint that a language model came from.

    config   its config.json, not quantised
    eyes     tensors of what sees, and hears, by name
    trained  what makes those of them in a dtype that a run trained, by name
    names    of the language model's tensors here, by those that it has written alone
    layers   what the names of most of them begin with here
    shapes   of the language model's tensors, by the names that it has written alone
    """

    config: Mapping[str, Any]
    eyes: Mapping[str, Any]
    names: Mapping[str, str]
    layers: str
    shapes: Mapping[str, tuple[int, ...]]
    trained: Mapping[str, Make] = dataclasses.field(default_factory=dict)

    def planned(self, text: Iterable[Planned], dtype: np.dtype, one_by_one: bool = False) -> Iterator[Planned]:
        """The checkpoint with these tensors of its language model written alone, and what sees, in `dtype` but for
        whole numbers. `one_by_one`: experts are, whatever the checkpoint has."""
        for one in text if one_by_one else together(text, self.shapes):
            yield dataclasses.replace(one, name=self.named(one.name))
        for name, stored in self.eyes.items():
            counts = isinstance(stored, Stored) and np.issubdtype(stored.dtype, np.integer)
            own = stored.dtype if counts else np.dtype(dtype)
            if name in self.trained:
                yield Planned(name, own, tuple(stored.shape), functools.partial(self.trained[name], own))
                continue
            yield Planned(name, own, tuple(stored.shape), functools.partial(_read, stored, own))

    def named(self, alone: str) -> str:
        """A tensor of the language model written alone, as the whole checkpoint calls it."""
        usual = self.layers + alone.removeprefix("model.") if alone.startswith("model.") else alone
        return self.names.get(alone, usual)


def whole(folder: pathlib.Path, options: Mapping[str, Any]) -> Whole | None:
    """Of a checkpoint by its config.json; None where it doesn't see, or is not in the folder any more."""
    if not sees(options) or not holds_weights(folder):
        return None
    opened = Folder.open(folder)
    stored, alone = dequantised(opened.tensors, opened.config), text_name(opened.config)
    eyes = {name: one for name, one in stored.items() if alone(name) is None}
    names = {alone(name): name for name in stored if name not in eyes}
    shapes = {own: tuple(stored[name].shape) for own, name in names.items()}
    layers = names.get(f"model.{EMBEDDING}", f"model.{EMBEDDING}").removesuffix(EMBEDDING)
    config = {name: value for name, value in options.items() if name not in OPTIONS}
    return Whole(config, eyes, names, layers, shapes)


def as_trained(seeing: Whole, found: Found, name: str = "params") -> Whole:
    """With the encoder's weights that a run trained; `name` is "params" or "ema"."""
    if part_of(found) == "frozen":
        return seeing
    config = sight_of(pathlib.Path(found.source.folder), found.source.options).encoder
    encoder = Encoder.make(config, np.dtype(np.float32), MeshSpec().build(jax.devices()[:1]))
    made = trained_tensors(found, encoder, name)
    return dataclasses.replace(seeing, trained={n: made[m] for n in seeing.eyes if (m := in_map(encoder, n)) in made})


def _read(stored: Any, dtype: np.dtype) -> np.ndarray:
    return np.asarray(stored.read(...)).astype(dtype)
