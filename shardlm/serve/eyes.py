"""The encoder of a model that sees, beside its runner: weights on every device of the replica, whole, and a program for
each size of an image."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, holds_weights
from shardlm.models.pretrained import Pretrained
from shardlm.opened import Found
from shardlm.progress_bar import bytes_bar
from shardlm.serve import programs
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.runner_config import RunnerConfig
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sight_of
from shardlm.vision.sight import Sight

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Eyes:
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

    def on(self, mesh: Mesh) -> "Eyes":
        """With weights on the devices of a mesh."""
        return dataclasses.replace(self, params=jax.device_put(self.params, NamedSharding(mesh, PartitionSpec())))

    def fitted(self, sizes: RunnerConfig, config: EngineConfig) -> tuple["Eyes", RunnerConfig]:
        """With room for the images of any prompt, and of what a few batches read. Raises ShardlmError where a chunk
        would have to be longer than a batch."""
        places = max(sizes.max_model_len, 4 * sizes.max_batch_tokens)
        room = sizes.max_batch_tokens - sizes.max_rows * (1 + config.drafts)
        if self.sight.whole and (most := self.sight.sizes[-1] // self.sight.merged) > room:
            raise ShardlmError(
                f"max_num_batched_tokens={sizes.max_batch_tokens} beside max_num_seqs={sizes.max_rows} has room for "
                f"{room} tokens, and the {most} of an image are read at once; raise the first by {most - room}"
            )
        # Inside of an image tokens see those after them, which cuDNN's part of a chunk does not do (chunk_attention.py).
        in_parts = sizes.in_parts and not self.sight.whole
        whole = {"image_places": places, "whole_images": self.sight.whole, "in_parts": in_parts}
        sizes = dataclasses.replace(sizes, **whole)
        return dataclasses.replace(self, places=places), sizes


def sized(eyes: Eyes | None) -> dict[str, Any]:
    """What state.empty_state needs to know."""
    return {"vectors": eyes.vectors, "axes": eyes.sight.axes} if eyes else {}


def sight_for(found: Found, config: EngineConfig) -> Sight | None:
    """How a model that was found is to see; None where its text alone is served, which is told of one that could see.
    Raises ShardlmError where images are asked for that it cannot be shown."""
    source = found.source
    here = isinstance(source, Pretrained) and holds_weights(pathlib.Path(source.folder))
    sight = sight_of(pathlib.Path(source.folder), source.options) if here and config.max_images != 0 else None
    why = _cannot(config) if sight else "no encoder of it is known here"
    if sight and not why:
        return sight
    if config.max_images:
        raise ShardlmError(f"limit_mm_per_prompt={dict(config.limit_mm_per_prompt)}: {why}; leave it out")
    if sight:
        log.warning("images are not read, as %s: the text of the model is served alone", why)
    return None


def _cannot(config: EngineConfig) -> str:
    """Why a model that sees is not to; "" where it can."""
    if config.mesh.pipeline > 1:
        return f"pipeline={config.mesh.pipeline} has stages"
    return "deterministic=True reads each token alone" if config.deterministic else ""


def open_eyes(sight: Sight, source: Pretrained, dtype: jnp.dtype, embed_dim: int, mesh: Mesh) -> Eyes:
    """The encoder of a checkpoint, on the devices of one replica."""
    encoder = Encoder.make(sight.encoder, dtype, mesh)
    with bytes_bar("reading the encoder of images", jax.process_index() == 0) as progress:
        params = encoder.load(Folder.open(pathlib.Path(source.folder)), progress)
    return Eyes(sight, encoder, params, (1 + sight.deep) * embed_dim)
