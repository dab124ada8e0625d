"""What a model that sees holds on each device beside its text: its encoder, and the vectors of images whose prompts are
being read."""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from shardlm.hf_files import OF_IMAGES
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.image_encoder import places_of
from shardlm.vision.encoder import parameters_of
from shardlm.vision.registry import sight_of


class Seen(NamedTuple):
    """parameters of the encoder; width: numbers of a vector."""

    parameters: int
    width: int


def seen_of(folder: pathlib.Path, options: Mapping[str, Any], embed_dim: int) -> Seen | None:
    """Of a checkpoint's folder; None where it reads text, or no file says how images are prepared."""
    if not any((folder / name).is_file() for name in OF_IMAGES):
        return None
    sight = sight_of(folder, options)
    return Seen(parameters_of(sight.encoder), (1 + sight.deep) * embed_dim) if sight else None


def bytes_of(seen: Seen | None, engine: EngineConfig, length: int, batch_tokens: int, itemsize: int) -> tuple[int, int]:
    """(the encoder's, the vectors') bytes on each device of the first stage, as the engine allocates them."""
    if seen is None or engine.max_images == 0:
        return 0, 0
    return seen.parameters * itemsize, places_of(length, batch_tokens) * seen.width * itemsize
