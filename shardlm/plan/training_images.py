"""What images add to a step of training on them: an encoder that stands still, whole on each device, and the vectors
that it makes, which come with the batch. Estimates, by formulas; the encoder's own temporaries (87 to 372 MiB for
images of up to 16,384 patches, compiled) are not counted."""

import dataclasses

import jax.numpy as jnp

from shardlm.plan.serving.encoder import Image
from shardlm.plan.serving.images import Seen
from shardlm.plan.serving.time import image_seconds
from shardlm.plan.sketch import Sketch

DTYPE = jnp.dtype("bfloat16")  # of the encoder and of its vectors


@dataclasses.dataclass(frozen=True)
class TrainingImages:
    """encoder_bytes    of its weights, on each device
    vector_bytes     of one device's part of a batch's vectors [B, T, (1 + deep) * D]
    encoder_seconds  of a step, on each device: it reads the images of its own rows, which devices of context and tensor
                     all read
    """

    encoder_bytes: int
    vector_bytes: int
    encoder_seconds: float

    @classmethod
    def of(cls, sketch: Sketch, seen: Seen, image: Image, images_per_row: float) -> "TrainingImages":
        """With so many images in a row, each as `image` is. Vectors lie as the batch's other arrays do."""
        act, train, mesh = sketch.rules.act, sketch.config.train, sketch.mesh
        ways = mesh.size(*act.axes("batch"))
        numbers = seen.width * train.global_batch * train.seq_len // (ways * mesh.size(*act.axes("whole_seq")))
        images = train.global_batch / ways * images_per_row
        seconds = images * image_seconds(image, sketch.gpu, DTYPE)
        return cls(DTYPE.itemsize * seen.parameters, DTYPE.itemsize * numbers, seconds)
