"""The encoder of Command A Vision (transformers' modeling_cohere2_vision.py is the definition): SigLIP on tiles of one
size, and a gated product of merged patches into the text's width."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution, Params
from shardlm.models.naming import Names
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import swiglu
from shardlm.vision.cohere2_images import Cohere2Images
from shardlm.vision.images import named, processing, token_ids
from shardlm.vision.options import vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import WITH_PROJECTOR
from shardlm.vision.siglip_tiles import SiglipTilesConfig
from shardlm.vision.tiles import tile_sizes
from shardlm.vision.tower import Linear, TowerConfig, linear_names

USUAL = {"hidden_size": 1152, "intermediate_size": 3072, "image_size": 512, "num_hidden_layers": 27}
TOKENS = {
    "boi_token": "<|START_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
    "eoi_token": "<|END_OF_IMG|>",
}


@dataclasses.dataclass(frozen=True)
class Cohere2Config:
    """eyes: SigLIP; inner: width of the first product, of which half gates the other; width of vectors."""

    eyes: SiglipTilesConfig
    inner: int
    width: int

    tensors = WITH_PROJECTOR

    @property
    def tower(self) -> TowerConfig:
        """Its layers."""
        return self.eyes.tower

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return self.eyes.inputs

    def module(self, params: Params) -> nnx.Module:
        return Cohere2Encoder(self, params)

    def names(self) -> Names:
        return {
            **self.eyes.names("eyes", "vision_tower."),
            **linear_names("first", "multi_modal_projector.linear_1", bias=True),
            **linear_names("second", "multi_modal_projector.linear_2", bias=True),
        }


class Cohere2Encoder(nnx.Module):
    """SigLIP and two products, between which the second half gates the first."""

    def __init__(self, config: Cohere2Config, params: Params):
        self.config = config
        self.eyes = config.eyes.module(params)
        self.first = Linear(config.eyes.merge**2 * config.tower.width, config.inner, True, params)
        self.second = Linear(config.inner // 2, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        x = self.eyes(inputs, count, execution)
        x = self.first(x.reshape(-1, self.config.eyes.merge**2 * x.shape[-1]), execution)
        up, gate = jnp.split(x, 2, axis=-1)
        return self.second(swiglu(gate, up), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` cohere2_vision. A token ends each tile."""
    told = USUAL | dict(options["vision_config"])
    own, merge = vision_options(told, "siglip_vision_model"), options.get("downsample_factor") or 2
    eyes = SiglipTilesConfig.told(own, told["image_size"])
    own.finish()
    if eyes.across % merge:
        raise ShardlmError(
            f"config.json has downsample_factor={merge} of tiles of {eyes.across} patches; it must divide"
        )
    eyes = dataclasses.replace(eyes, merge=merge, last_norm=True)
    inner = options.get("alignment_intermediate_size") or 36_864
    images = Cohere2Images.told(processing(folder, asked), eyes.patch * eyes.across, eyes.patch, merge)
    token = options.get("image_token_id") or 255_036
    begin, after, end = token_ids(folder, [named(folder, name, usual) for name, usual in TOKENS.items()])

    def tokens(picture) -> list[int]:
        tiles, each = picture.grid
        return [begin, *[*[token] * each, after] * tiles, end]

    config = Cohere2Config(eyes, inner, text_config(options)["hidden_size"])
    return Sight(token, token, images, tokens, tile_sizes(images.most, eyes.across**2), config, merge**2)
