"""Whether a model that is opened to be served is to see, and its encoder."""

import logging
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardlm.errors import ShardlmError
from shardlm.hf_files import Folder, holds_weights
from shardlm.models.pretrained import Pretrained
from shardlm.opened import Found
from shardlm.progress_bar import bytes_bar
from shardlm.run_files import CONFIG
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.image_encoder import ImageEncoder
from shardlm.vision.encoder import Encoder
from shardlm.vision.registry import sees, sight_of
from shardlm.vision.sight import Sight
from shardlm.vision.trained import with_trained

log = logging.getLogger(__name__)


def sight_for(found: Found, config: EngineConfig) -> Sight | None:
    """How a model that was found is to see; None where its text alone is served, which is told of one that could see.
    Raises ShardlmError where images are asked for that it cannot be shown."""
    source = found.source
    asked = config.mm_processor_kwargs or {}
    could = config.max_images != 0 and isinstance(source, Pretrained) and sees(source.options)
    lost = could and not holds_weights(pathlib.Path(source.folder))
    sight = sight_of(pathlib.Path(source.folder), source.options, asked) if could and not lost else None
    why = f"its encoder is in {source.folder}, which has no weights now" if lost else _cannot(config, sight)
    if not why:
        if (config.limit_mm_per_prompt or {}).get("video") and not sight.videos:
            limits = dict(config.limit_mm_per_prompt)
            raise ShardlmError(f"limit_mm_per_prompt={limits}: this model reads images and no videos; leave those out")
        return sight
    if config.max_images or (config.limit_mm_per_prompt or {}).get("video"):
        raise ShardlmError(f"limit_mm_per_prompt={dict(config.limit_mm_per_prompt)}: {why}; leave it out")
    if asked:
        raise ShardlmError(f"mm_processor_kwargs={dict(asked)}: {why}; leave it out")
    if could:
        if lost and found.run:
            why += f" (write where it is now as model.folder in {found.run.run_dir / CONFIG})"
        log.warning("images are not read, as %s: the text of the model is served alone", why)
    return None


def _cannot(config: EngineConfig, sight: Sight | None) -> str:
    """Why a model is not to see; "" where it can."""
    if sight is None:
        return "no encoder of it is known here"
    if config.deterministic and sight.whole:
        what = "a prompt" if sight.prefix else "an image"
        return f"deterministic=True reads each token alone, and those of {what} see the ones after them"
    return ""


def open_image_encoder(sight: Sight, found: Found, dtype: jnp.dtype, embed_dim: int, mesh: Mesh) -> ImageEncoder:
    """The encoder of a checkpoint, or of a run as it was trained, on the devices of one replica."""
    encoder = Encoder.make(sight.encoder, dtype, mesh)
    with bytes_bar("reading the encoder of images", jax.process_index() == 0) as progress:
        params = encoder.load(Folder.open(pathlib.Path(found.source.folder)), progress)
    params = with_trained(found, encoder, params)
    return ImageEncoder(sight, encoder, params, (1 + sight.deep) * embed_dim)
