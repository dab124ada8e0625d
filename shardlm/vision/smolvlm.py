"""The encoder of Idefics 3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299): SigLIP on
tiles of one size, and one product of merged patches into the text's width."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.param import Execution, Params
from shardlm.models.naming import Names
from shardlm.models.text_parts import text_config
from shardlm.tokenizer import Tokenizer
from shardlm.vision.attending import Tiles
from shardlm.vision.images import places, processing, token_ids
from shardlm.vision.options import vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import OnSiglip, Siglip, SiglipConfig
from shardlm.vision.smolvlm_images import SmolvlmImages, learned
from shardlm.vision.tiles import tile_sizes
from shardlm.vision.tower import Linear, linear_names
from shardlm.vision.tower_weights import Tensors


@dataclasses.dataclass(frozen=True)
class SmolvlmConfig(OnSiglip):
    """siglip; across: patches of a tile's side; merge: patches a side that one vector is made of; width of vectors."""

    across: int
    merge: int
    width: int

    tensors = Tensors(("vision_model.", "connector."))

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": self.siglip.inputs["pixels"]}

    @property
    def positions(self) -> np.ndarray:
        """The learned one of each patch of a tile, in the order of images.patches."""
        positions = round(self.siglip.positions**0.5)
        place = learned(self.across, positions)
        row, column = places(self.across, self.across, self.merge)
        return (place[row] * positions + place[column]).astype(np.int32)

    def module(self, params: Params) -> nnx.Module:
        return SmolvlmEncoder(self, params)

    def names(self) -> Names:
        out = linear_names("out", "connector.modality_projection.proj", bias=False)
        return self.siglip.names("siglip", "vision_model.") | out


class SmolvlmEncoder(nnx.Module):
    """SigLIP and "out" [M * D, width] of M merged patches."""

    def __init__(self, config: SmolvlmConfig, params: Params):
        self.config = config
        self.siglip = Siglip(config.siglip, params)
        self.out = Linear(config.merge**2 * config.siglip.tower.width, config.width, False, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        each = self.config.across**2
        positions = jnp.tile(self.config.positions, len(inputs["pixels"]) // each)
        x = self.siglip({**inputs, "positions": positions}, count, execution, Tiles(each))
        return self.out(x.reshape(-1, self.config.merge**2 * x.shape[-1]), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` idefics3 and smolvlm. Tokens say of each tile where it stands, and line ends part their rows."""
    told = options["vision_config"]
    own, merge = vision_options(told, "smolvlm_vision"), options.get("scale_factor") or 2
    own.aside("max_image_size", "size", "use_base_siglip")
    siglip = SiglipConfig.told(own, told.get("image_size") or 224, patch=32, width=1152, heads=16)
    own.finish()
    images = SmolvlmImages.told(processing(folder, asked), siglip.patch, merge)
    token = options.get("image_token_id") or 128_257
    around, every = token_ids(folder, ("<fake_token_around_image>", "<global-img>"))
    longest = round(images.most**0.5)
    named = [(row, column) for row in range(1, longest + 1) for column in range(1, longest + 1)] if longest > 1 else []
    place = dict(zip(named, token_ids(folder, [f"<row_{row}_col_{column}>" for row, column in named]), strict=True))
    tokenizer = Tokenizer.load(folder)
    line, lines = (tokenizer.encode(text) for text in ("\n", "\n\n"))

    def tokens(picture) -> list[int]:
        (rows, columns), own, found = picture.tiles, [token] * picture.grid[1], []
        for row in range(1, rows + 1) if rows * columns > 1 else ():
            for column in range(1, columns + 1):
                found += [around, place[row, column], *own]
            found += line if row < rows else lines
        return [*found, around, every, *own, around]

    config = SmolvlmConfig(siglip, images.across, merge, text_config(options)["hidden_size"])
    return Sight(token, token, images, tokens, tile_sizes(images.most, images.across**2), config, merge**2)
