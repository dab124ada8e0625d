"""The encoders of Command A Vision and Aya Vision (transformers' modeling_cohere2_vision.py and modeling_aya_vision.py
are the definition): SigLIP on tiles of one size, and a gated product of merged patches into the text's width."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params
from shardlm.models.naming import Names
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import swiglu
from shardlm.vision.cohere2_images import Cohere2Images
from shardlm.vision.images import added, named, processing, spelt, token_ids
from shardlm.vision.internvl_images import InternvlImages
from shardlm.vision.options import layers_used, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import WITH_PROJECTOR, without_last
from shardlm.vision.siglip_tiles import SiglipTilesConfig
from shardlm.vision.tiles import tile_sizes
from shardlm.vision.tower import Linear, TowerConfig, linear_names, norm_names
from shardlm.vision.tower_weights import Tensors

USUAL = {"hidden_size": 1152, "intermediate_size": 3072, "image_size": 512, "num_hidden_layers": 27}
OF_AYA = {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384}
OF_AYA |= {"num_hidden_layers": 26, "num_attention_heads": 14}
WRITTEN = "<image>"  # by Aya's chat template, in the place of an image
TOKENS = {
    "boi_token": "<|START_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
    "eoi_token": "<|END_OF_IMG|>",
}


@dataclasses.dataclass(frozen=True)
class Cohere2Config:
    """eyes: SigLIP; inner: width of the first product, of which half gates the other; width of vectors; norm: of merged
    patches, if any; later: layers of the file that do not run."""

    eyes: SiglipTilesConfig
    inner: int
    width: int
    norm: NormConfig | None = None
    later: int = 0

    @property
    def tensors(self) -> Tensors:
        return WITH_PROJECTOR if self.eyes.last_norm else without_last(self.tower.layers, self.later)

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
            **(norm_names(self.norm, "norm", "multi_modal_projector.layernorm") if self.norm else {}),
            **linear_names("first", "multi_modal_projector.linear_1", bias=True),
            **linear_names("second", "multi_modal_projector.linear_2", bias=True),
        }


class Cohere2Encoder(nnx.Module):
    """SigLIP, a norm where there is one, and two products, between which the second half gates the first."""

    def __init__(self, config: Cohere2Config, params: Params):
        self.config = config
        self.eyes = config.eyes.module(params)
        merged = config.eyes.merge**2 * config.tower.width
        if config.norm:
            self.norm = Norm(config.norm, merged, params)
        self.first = Linear(merged, config.inner, True, params)
        self.second = Linear(config.inner // 2, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        x = self.eyes(inputs, count, execution)
        x = x.reshape(-1, self.config.eyes.merge**2 * x.shape[-1])
        x = self.first(self.norm(x, execution) if self.config.norm else x, execution)
        up, gate = jnp.split(x, 2, axis=-1)
        return self.second(swiglu(gate, up), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` cohere2_vision, where a token ends each tile, and aya_vision, where one with its number begins
    it."""
    aya = options["model_type"] == "aya_vision"
    config = _config(options, aya)
    eyes = config.eyes
    make = InternvlImages if aya else Cohere2Images
    images = make.told(processing(folder, asked), eyes.patch * eyes.across, eyes.patch, eyes.merge)
    vector = options.get("image_token_index") or options.get("image_token_id") or 255_036
    begin, after, end = token_ids(folder, [named(folder, name, usual) for name, usual in TOKENS.items()])
    tile, whole = _before_tiles(folder, images.most) if aya else ((), ())

    def tokens(picture) -> list[int]:
        tiles, each = picture.grid
        own = [vector] * each
        if not aya:
            return [begin, *[*own, after] * tiles, end]
        return [begin, *(id for number in tile[: tiles - 1] for id in (*number, *own)), *whole, *own, end]

    token = added(folder, WRITTEN, vector) if aya else vector
    return Sight(token, vector, images, tokens, tile_sizes(images.most, eyes.across**2), config, eyes.merge**2)


def _config(options: Mapping[str, Any], aya: bool) -> Cohere2Config:
    told = (OF_AYA if aya else USUAL) | dict(options["vision_config"])
    own, merge = vision_options(told, "siglip_vision_model"), options.get("downsample_factor") or 2
    eyes, width = SiglipTilesConfig.told(own, told["image_size"]), text_config(options)["hidden_size"]
    own.finish()
    if eyes.across % merge:
        raise ShardlmError(
            f"config.json has downsample_factor={merge} of tiles of {eyes.across} patches; it must divide"
        )
    if not aya:
        eyes = dataclasses.replace(eyes, merge=merge, last_norm=True)
        return Cohere2Config(eyes, options.get("alignment_intermediate_size") or 36_864, width)
    if (strategy := options.get("vision_feature_select_strategy") or "full") != "full":
        raise ShardlmError(f"config.json has vision_feature_select_strategy={strategy!r}; supported: 'full'")
    every, used = eyes.tower.layers, layers_used(eyes.tower.layers, options.get("vision_feature_layer", -1))
    eyes = dataclasses.replace(eyes, merge=merge, tower=dataclasses.replace(eyes.tower, layers=used))
    norm = NormConfig("layer", float(options.get("adapter_layer_norm_eps") or 1e-6))
    return Cohere2Config(eyes, options.get("alignment_intermediate_size") or width, width, norm, every - used)


def _before_tiles(folder: pathlib.Path, most: int) -> tuple[list[Sequence[int]], Sequence[int]]:
    """What begins each of so many tiles, and that which shows all: a token each, or the pieces of its name."""
    each = spelt(folder, [*(f"TILE_{number}" for number in range(1, most + 1)), "TILE_GLOBAL"])
    return each[:-1], each[-1]
