"""The engine of a checkpoint, to be measured: as random_engine.py's, but with its own weights, tokenizer, chat template
and, where it sees, encoder of images."""

import dataclasses
import pathlib

import numpy as np

from shardlm.chat import ChatTemplate
from shardlm.errors import ShardlmError
from shardlm.opened import describe
from shardlm.serve.bench.image_work import Size
from shardlm.serve.build import build
from shardlm.serve.engine import Engine
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.open_image_encoder import sight_for
from shardlm.serve.replicas import EngineGroup

BESIDE = 128  # tokens that a chat template may write around a message


def checkpoint_engine(
    model: str, config: EngineConfig, needed: int, images: int, size: Size
) -> tuple[Engine | EngineGroup, ChatTemplate | None]:
    """For requests of `needed` tokens beside `images` images of `size`, where config.max_model_len does not say. Raises
    ShardlmError for images where the model does not see."""
    found = describe(model)
    sight = sight_for(found, config) if images else None
    if images and sight is None:
        raise ShardlmError(
            f"images_per_prompt={images}: {model} does not see here; leave images out, or give a checkpoint that sees"
        )
    if not config.max_model_len:
        each = len(sight.tokens(sight.prepare(np.zeros((*size, 3), np.uint8)))) if images else 0
        length = needed + images * each + BESIDE
        config = dataclasses.replace(config, max_model_len=min(length, found.longest or length))
    template = ChatTemplate.find(pathlib.Path(found.folder))
    engine, _ = build(model, config)
    return engine, template
