"""The encoder of a model that sees, beside its runner: weights on every device of the replica, whole, and a program for
each size of an image."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.serve import programs
from shardlm.serve.runner_config import RunnerConfig
from shardlm.vision.encoder import Encoder
from shardlm.vision.sight import Sight


@dataclasses.dataclass(frozen=True, eq=False)
class ImageEncoder:
    """`places`: rows of the buffer of vectors, which are `width` numbers each."""

    sight: Sight
    encoder: Encoder
    params: Any
    width: int
    places: int = 0

    @property
    def vectors(self) -> tuple[int, int]:
        """The shape of the buffer."""
        return self.places, self.width

    def shapes(self, state: Any) -> dict[Any, tuple[Callable, tuple]]:
        """Key -> (function, example arguments) of the programs that read images."""
        function = functools.partial(programs.look, self.encoder)
        return {("look", size): (function, (self.params, state, *self._example(size))) for size in self.sight.sizes}

    def _example(self, size: int) -> tuple:
        places = np.full(size // self.sight.merged, -1, np.int32)
        return {n: np.zeros(s.shape, s.dtype) for n, s in self.encoder.inputs(size).items()}, np.int32(0), places

    def size_of(self, patches: int) -> int:
        """Of the program for an image of so many."""
        return next(size for size in self.sight.sizes if size >= patches)

    def buffer_bytes(self, max_model_len: int, max_batch_tokens: int) -> int:
        """Of the buffer, on each device."""
        return places_of(max_model_len, max_batch_tokens) * self.width * self.encoder.execution.dtype.itemsize

    def on(self, mesh: Mesh) -> "ImageEncoder":
        """With weights on the devices of a mesh."""
        return dataclasses.replace(self, params=jax.device_put(self.params, NamedSharding(mesh, PartitionSpec())))

    def fitted(self, sizes: RunnerConfig, drafts: int) -> tuple["ImageEncoder", RunnerConfig]:
        """With room for the images of any prompt, and of what a few batches read. Raises ShardlmError where a chunk
        would have to be longer than a batch."""
        places, sight = places_of(sizes.max_model_len, sizes.max_batch_tokens), self.sight.up_to(sizes.max_model_len)
        room = sizes.max_batch_tokens - sizes.max_rows * (1 + drafts)
        if sight.whole and (most := min(sight.sizes[-1] // sight.merged, sizes.max_model_len)) > room:
            raise ShardlmError(
                f"max_num_batched_tokens={sizes.max_batch_tokens} beside max_num_seqs={sizes.max_rows} has room for "
                f"{room} tokens, and the {most} of an image are read at once; raise the first by {most - room}"
            )
        # Inside of an image tokens see those after them, which cuDNN's part of a chunk does not (chunk_attention.py).
        in_parts = sizes.in_parts and not sight.whole
        own = {"image_places": places, "in_parts": in_parts}
        return dataclasses.replace(self, places=places, sight=sight), dataclasses.replace(sizes, **own)


def places_of(max_model_len: int, max_batch_tokens: int) -> int:
    """Of the buffer of vectors."""
    return max(max_model_len, 4 * max_batch_tokens)


def sized(image_encoder: ImageEncoder | None) -> dict[str, Any]:
    """What state.empty_state needs to know."""
    return {"vectors": image_encoder.vectors, "axes": image_encoder.sight.axes} if image_encoder else {}
