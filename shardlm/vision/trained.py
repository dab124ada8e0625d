"""The weights of an encoder that a run trained: read from its checkpoint, and as tensors of the checkpoint that it
began with."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.checkpoint import REST, Checkpoints
from shardlm.models.naming import Tensor, join, renamed
from shardlm.opened import Found
from shardlm.optim import ENCODER
from shardlm.progress_bar import waiting
from shardlm.unread import Unread
from shardlm.vision.encoder import Encoder
from shardlm.vision.parts import EncoderPart, Path, trained_paths

Tree = Any
Make = Callable[[np.dtype], np.ndarray]


def part_of(found: Found) -> EncoderPart:
    """What a run trains of its encoder; of what is no run, and of runs from before there was a choice, nothing."""
    return found.run.config_json.get("train", {}).get("encoder", "frozen") if found.run else "frozen"


def parted(tree: Tree, paths: frozenset[Path]) -> tuple[Tree, Tree]:
    """Of a tree what is at these paths, and the rest."""
    flat = flatten_dict(tree)
    one, rest = ({path: a for path, a in flat.items() if (path in paths) == own} for own in (True, False))
    return unflatten_dict(one), unflatten_dict(rest)


def trained_of(encoder: Encoder, part: EncoderPart) -> frozenset[Path]:
    """The paths of its weights that are trained."""
    return trained_paths(flatten_dict(encoder.shapes), encoder.config.names(), part)


def with_trained(found: Found, encoder: Encoder, params: Tree, name: str = "params") -> Tree:
    """An encoder's weights, of the checkpoint that a run began with, where what was found is one with those that it
    trained in their places; `name` is "params" or "ema"."""
    if not (paths := trained_of(encoder, part_of(found))):
        return params
    shapes, _ = parted(encoder.shapes, paths)
    checkpoints = Checkpoints(found.run.checkpoints_dir)
    with waiting("reading the trained encoder", jax.process_index() == 0), checkpoints as reader:
        read = reader.restore_params({ENCODER: shapes}, found.run.step, name, optional=(REST,))[ENCODER]
    return unflatten_dict(flatten_dict(params) | flatten_dict(read))


def trained_tensors(found: Found, encoder: Encoder, name: str = "params") -> dict[str, Make]:
    """The checkpoint's tensors that a run trained, by the names of the encoder's map, with what makes each in a dtype:
    of a run that left its encoder as it was, none."""
    if not (paths := trained_of(encoder, part_of(found))):
        return {}
    shapes, _ = parted(encoder.shapes, paths)
    with Checkpoints(found.run.checkpoints_dir) as reader:
        unread = reader.unread_params({ENCODER: shapes}, found.run.step, name, optional=(REST,))[ENCODER]
    return tensors_of(encoder, flatten_dict(unread))


def tensors_of(encoder: Encoder, arrays: Mapping[Path, Unread]) -> dict[str, Make]:
    """The same of these weights of an encoder, which must be all of a tensor that is made of several."""
    names, groups = encoder.config.names(), {}
    for path, a in arrays.items():
        tensor = names[".".join(map(str, path))]
        groups.setdefault(tensor.name, []).append((tensor, a, encoder.layers.get(path, 0)))
    made = {}
    for called, parts in groups.items():
        _, _, layers = parts[0]
        for layer in range(layers or 1):
            at = (layer,) if layers else ()
            made[called.format(layer=layer)] = functools.partial(_joined, [(t, a) for t, a, _ in parts], at)
    return made


def _joined(parts: list[tuple[Tensor, Unread]], at: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return join([(tensor, a.part(at, dtype)) for tensor, a in parts])


def in_map(encoder: Encoder, name: str) -> str:
    """A tensor's name in files as the encoder's map has it."""
    return renamed(name, encoder.config.tensors.renames)
