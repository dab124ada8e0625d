"""What images add to a step of training on them: an encoder that stands still, whole on each device, and the vectors
that it makes, which come with the batch. Estimates, by formulas, of every way to run that a search looks at; the
encoder's own temporaries (87 to 372 MiB for images of up to 16,384 patches, compiled) are not counted."""

import dataclasses
import functools
import math
import pathlib

import jax.numpy as jnp
import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hardware import Gpu
from shardlm.models.pretrained import Pretrained
from shardlm.plan.serving.encoder import Image
from shardlm.plan.serving.images import Seen, seen_of
from shardlm.plan.serving.time import image_seconds
from shardlm.plan.sketch import Sketch
from shardlm.serve.bench.image_work import size_of
from shardlm.serve.image_encoder import places_of
from shardlm.serve.pool_size import CHUNK_TOKENS
from shardlm.train.config import RunConfig
from shardlm.train.seeing import prepared_as

DTYPE = jnp.dtype("bfloat16")  # of the encoder and of its vectors


@dataclasses.dataclass(frozen=True)
class RowImages:
    """Of every row of a run.

    count   how many
    size    pixels of each, (height, width)
    tokens  that stand for one
    seen    how the run's checkpoint sees
    image   one of them in the encoder's program
    """

    count: float
    size: tuple[int, int]
    tokens: int
    seen: Seen
    image: Image

    def added(self, sketch: Sketch) -> "TrainingImages":
        """What they add to a step. Vectors lie as the batch's other arrays do."""
        act, train, mesh = sketch.rules.act, sketch.config.train, sketch.mesh
        ways = mesh.size(*act.axes("batch"))
        numbers = self.seen.width * train.global_batch * train.seq_len // (ways * mesh.size(*act.axes("whole_seq")))
        images = math.ceil(train.global_batch / ways * self.count / (mesh.size(*mesh.sizes()) // ways))
        seconds = images * _seconds(self.image, sketch.gpu)
        return TrainingImages(DTYPE.itemsize * self.seen.parameters, DTYPE.itemsize * numbers, seconds)

    def sampled_bytes(self, seq_len: int) -> int:
        """Of the vectors that a copy which samples replies of so many tokens has room for (shardlm/reinforce)."""
        return DTYPE.itemsize * self.seen.width * places_of(seq_len, CHUNK_TOKENS[False])

    @classmethod
    def asked(cls, text: str, config: RunConfig) -> "RowImages":
        """By N@HEIGHTxWIDTH. Raises ShardlmError for what is none, for a model that does not see and for images that
        it does not read, or that a row has no room for."""
        number, _, size = text.partition("@")
        try:
            count, size = float(number), size_of(size)
        except (ShardlmError, ValueError):
            raise ShardlmError(f"images_per_row={text}: give N@HEIGHTxWIDTH, such as 2@896x896") from None
        seen = _seen(config)
        if not (seen and count > 0):
            raise ShardlmError(
                f"images_per_row={text}: the model is no checkpoint that sees, or none are asked for; set model to "
                "Pretrained(FOLDER) of one that does, or leave it out"
            )
        sight = seen.sight
        picture = sight.prepare(np.zeros((*size, 3), np.uint8))
        tokens, most = len(sight.tokens(picture)), config.train.seq_len
        if picture.patches > sight.sizes[-1] or count * tokens > most:
            raise ShardlmError(
                f"images_per_row={text}: an image is {tokens:,} tokens of {picture.patches:,} patches, and a row of "
                f"{most:,} tokens has {count:g}; ask for fewer or smaller ones, or for a longer train.seq_len"
            )
        patches = next(own for own in sight.sizes if own >= picture.patches)
        return cls(count, size, tokens, seen, Image(sight.encoder, patches, picture.patches, sight.merged))


def _seen(config: RunConfig) -> Seen | None:
    if not isinstance(config.model, Pretrained):
        return None
    width = config.model.transformer().embed_dim
    return seen_of(pathlib.Path(config.model.folder), config.model.options, width, prepared_as(config))


@dataclasses.dataclass(frozen=True)
class TrainingImages:
    """encoder_bytes    of its weights, on each device
    vector_bytes     of one device's part of a batch's vectors [B, T, (1 + deep) * D]
    encoder_seconds  of a step, on each device: those that share rows read their images in turn
    """

    encoder_bytes: int
    vector_bytes: int
    encoder_seconds: float

    @property
    def nbytes(self) -> int:
        """On each device, throughout a step."""
        return self.encoder_bytes + self.vector_bytes


@functools.lru_cache(maxsize=256)
def _seconds(image: Image, gpu: Gpu) -> float:
    return image_seconds(image, gpu, DTYPE)
