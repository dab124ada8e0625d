"""What a model that sees has beside its text: its encoder and the vectors of images whose prompts are being read, which
each device holds, and the images of a prompt, as its own preparation makes them."""

import dataclasses
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import OF_IMAGES
from shardlm.plan.serving.encoder import Image
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.image_encoder import places_of
from shardlm.vision.encoder import parameters_of
from shardlm.vision.read import check_size
from shardlm.vision.registry import sight_of
from shardlm.vision.sight import Sight

_AS_IT_IS: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Seen:
    """parameters of the encoder; width: numbers of a vector; sight: how images are prepared."""

    parameters: int
    width: int
    sight: Sight = dataclasses.field(compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Images:
    """Of every prompt, before its words.

    count   how many
    size    pixels of each, (height, width)
    tokens  that stand for all of them
    image   one of them in the encoder's program
    """

    count: int
    size: tuple[int, int]
    tokens: int
    image: Image


def seen_of(
    folder: pathlib.Path, options: Mapping[str, Any], embed_dim: int, asked: Mapping[str, Any] = _AS_IT_IS
) -> Seen | None:
    """Of a checkpoint's folder; None where it reads text, or no file says how images are prepared. `asked`: how
    otherwise than that (registry.sight_of)."""
    if not any((folder / name).is_file() for name in OF_IMAGES):
        return None
    sight = sight_of(folder, options, asked)
    return Seen(parameters_of(sight.encoder), (1 + sight.deep) * embed_dim, sight) if sight else None


def is_read(seen: Seen | None, engine: EngineConfig) -> bool:
    """Whether the engine reads images."""
    return seen is not None and engine.max_images != 0


def bytes_of(seen: Seen | None, engine: EngineConfig, length: int, batch_tokens: int, itemsize: int) -> tuple[int, int]:
    """(the encoder's, the vectors') bytes on each device of the first stage, as the engine allocates them."""
    if not is_read(seen, engine):
        return 0, 0
    return seen.parameters * itemsize, places_of(length, batch_tokens) * seen.width * itemsize


def images_of(
    name: str, seen: Seen | None, engine: EngineConfig, count: int, size: tuple[int, int], length: int
) -> Images | None:
    """`count` images of so many pixels before each prompt of the model `name`; None of none. `length`: max_model_len.
    Raises ShardlmError where they are not read."""
    if not count:
        return None
    if seen is None:
        raise ShardlmError(
            f"images_per_prompt={count}: {name} does not see here, or no {' or '.join(OF_IMAGES)} beside its "
            "config.json says how images are prepared; leave images out, or give the folder of a checkpoint that sees"
        )
    if engine.max_images is not None and count > engine.max_images:
        raise ShardlmError(
            f"images_per_prompt={count} is more than the {engine.max_images} of limit_mm_per_prompt; ask for fewer, or "
            "raise that"
        )
    check_size(size[1], size[0])
    sight = seen.sight.up_to(length)
    picture = sight.prepare(np.zeros((*size, 3), np.uint8))
    if picture.patches > sight.sizes[-1]:
        raise ShardlmError(
            f"an image of {size[1]} x {size[0]} pixels makes {picture.vectors:,} tokens, and max_model_len={length:,}: "
            "give smaller ones, or raise max_model_len"
        )
    patches = next(own for own in sight.sizes if own >= picture.patches)
    tokens = len(sight.expanded([sight.token] * count, [picture] * count)[0])
    return Images(count, size, tokens, Image(sight.encoder, patches, picture.patches, sight.merged))
