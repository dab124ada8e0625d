"""New weights for the encoder of a model that sees while it is served: those of the checkpoint that the new weights of
its text come from, where that has some."""

import dataclasses
import logging
import os
import pathlib
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from shardlm.errors import ShardlmError
from shardlm.hf_files import OF_IMAGES, Folder, holds_weights
from shardlm.models.pretrained import Pretrained
from shardlm.opened import Found, describe
from shardlm.optim import ENCODER
from shardlm.serve.alike import of_files
from shardlm.serve.followers import everywhere
from shardlm.serve.image_encoder import ImageEncoder
from shardlm.serve.live_weights import in_memory
from shardlm.serve.runner import Runner
from shardlm.vision.registry import sees, sight_of
from shardlm.vision.trained import with_trained

log = logging.getLogger(__name__)

Tree = Any


def new_encoder(weights: Any, runner: Runner) -> Tree | None:
    """Those of a checkpoint's path, as live_weights.new_weights takes it, at the places of the encoder's that `runner`
    has; of arrays those that a run trains (`TrainState.params`), in the places of what is served. None: that one stays,
    as the runner's model does not see, arrays have no encoder, or the checkpoint has none, which is logged. Images are
    prepared as they were at the start in any case.

    Raises: ShardlmError for another encoder than is served, or memory that is too small for both.
    """
    own = runner.image_encoder
    if own is None:
        return None
    if not isinstance(weights, str | os.PathLike):
        return in_memory(lambda: _learned(own, weights[ENCODER]), own.params) if ENCODER in weights else None
    weights = os.fspath(weights)
    found = describe(weights)
    source = found.source
    if not isinstance(source, Pretrained) or not sees(source.options):
        return _stays(f"{weights} has none")
    folder = pathlib.Path(source.folder)
    if not holds_weights(folder):
        return _stays(f"that of {weights} is in {folder}, which has no weights now")
    _check(own, folder, source)
    told = (weights, of_files(weights)) if runner.followers else ()
    return everywhere(runner, "new_encoder", told, lambda: in_memory(lambda: _read(own, found), own.params))


def _stays(why: str) -> None:
    log.warning("images are read by the encoder that was there before, as %s", why)


def _check(own: ImageEncoder, folder: pathlib.Path, source: Pretrained) -> None:
    """Whether the folder's encoder is the one that programs were compiled for. Raises ShardlmError where it is not."""
    served, new = own.encoder.config, sight_of(folder, source.options).encoder
    if hasattr(served, "pixels") and not any((folder / name).is_file() for name in OF_IMAGES):
        new = dataclasses.replace(new, pixels=served.pixels)  # which a folder that a trainer wrote does not say
    if hasattr(served, "films"):  # nor, without a tokenizer, whether videos are read: by the same weights
        new = dataclasses.replace(new, films=served.films)
    if new != served:
        raise ShardlmError(
            f"{folder} has another encoder of images than what is served: {new}, served is {served}; start the server "
            "with it"
        )


def _learned(own: ImageEncoder, trained: Tree) -> Tree:
    """Copies, which whoever gave the arrays may donate afterwards."""
    there, given = flatten_dict(own.params), flatten_dict(trained)
    wrong = sorted(".".join(map(str, p)) for p, a in given.items() if p not in there or there[p].shape != a.shape)
    if wrong:
        raise ShardlmError(f"these weights are of another encoder of images than what is served: {wrong[0]} is another")
    made = {
        path: jax.device_put(a.astype(there[path].dtype), there[path].sharding, may_alias=False)
        for path, a in given.items()
    }
    return jax.block_until_ready(unflatten_dict(there | made))


def _read(own: ImageEncoder, found: Found) -> Tree:
    read = with_trained(found, own.encoder, own.encoder.load(Folder.open(pathlib.Path(found.source.folder))))
    return jax.block_until_ready(jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), read, own.params))
