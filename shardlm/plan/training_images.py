"""What images add to a step of training on them: an encoder, whole on each device, the vectors that it makes, which
come with the batch, and what training it too takes. Estimates, by formulas, of every way to run that a search looks at;
the encoder's own temporaries are not counted (compiled: 87 to 372 MiB for images of up to 16,384 patches, and 1.5 GiB
for 4,096 on the way back to a tower of 0.4 B parameters that is trained)."""

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
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.state import MASTER, moments
from shardlm.serve.bench.image_work import size_of
from shardlm.serve.image_encoder import places_of
from shardlm.serve.pool_size import CHUNK_TOKENS
from shardlm.train.config import RunConfig
from shardlm.train.learned_encoder import split_as
from shardlm.train.seeing import prepared_as
from shardlm.vision.encoder import shapes_of
from shardlm.vision.parts import trained_paths

DTYPE = jnp.dtype("bfloat16")  # of the encoder and of its vectors
# How often a step goes through an encoder, a backward pass counted as two forward passes: once to read; to train what
# comes after the tower once more; to train that too twice more, since each of its layers is made anew, and back.
PASSES = {"frozen": 1, "projector": 2, "all": 5}


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
        learns = train.encoder != "frozen"
        compares = learns and sketch.config.preference.compares  # with the checkpoint's own encoder, and what that saw
        seconds = (PASSES[train.encoder] + compares) * images * _seconds(self.image, sketch.gpu)
        learned = _learned_bytes(sketch, self.seen) if learns else 0
        weights, vectors = (1 + compares) * self.seen.parameters, (1 + learns + compares) * numbers
        return TrainingImages(sketch.itemsize * weights, learned, sketch.itemsize * vectors, seconds)

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
    """encoder_bytes    of its weights that read, on each device; of preferences those before training too
    learned_bytes    of what is trained of it (train.encoder), on each device: weights in float32 and the optimizer's
                     state where they rest, and the sums of its gradients, whole
    vector_bytes     of one device's part of a batch's vectors [B, T, (1 + deep) * D], with their gradients where the
                     encoder is trained, and with those that preferences are compared with
    encoder_seconds  of a step, on each device: those that share rows read their images in turn
    """

    encoder_bytes: int
    learned_bytes: int
    vector_bytes: int
    encoder_seconds: float

    @property
    def nbytes(self) -> int:
        """On each device, throughout a step."""
        return self.encoder_bytes + self.learned_bytes + self.vector_bytes


def _learned_bytes(sketch: Sketch, seen: Seen) -> int:
    config, rules, encoder = sketch.config, sketch.rules, seen.sight.encoder
    shapes = shapes_of(encoder)
    trained = [shapes[path] for path in trained_paths(shapes, encoder.names(), config.train.encoder)]
    weights = [Weight("encoder", shape, split_as(shape, rules.optimizer), 0, MASTER, True) for shape in trained]
    copies = [rules.rest] + [rules.optimizer] * (config.optim.ema_decay > 0)
    at_rest = sum(MASTER * weight.numbers(table) for weight in weights for table in copies)
    return at_rest + moments(weights, config.optim, rules.optimizer) + sum(MASTER * math.prod(s) for s in trained)


@functools.lru_cache(maxsize=256)
def _seconds(image: Image, gpu: Gpu) -> float:
    return image_seconds(image, gpu, DTYPE)
