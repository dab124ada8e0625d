"""LLaVA's form of a checkpoint (https://arxiv.org/abs/2310.03744): an encoder of another family, and two products into
the text's width; in LLaVA-NeXT's of tiles, whose vectors are put together again."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import Activation, activate
from shardlm.vision import pixtral
from shardlm.vision.clip import ClipConfig
from shardlm.vision.clip_images import ClipImages
from shardlm.vision.images import processing
from shardlm.vision.options import activation_of, layers_used, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import without_last
from shardlm.vision.siglip_tiles import SiglipTilesConfig
from shardlm.vision.tower import Linear, TowerConfig, linear_names, shared
from shardlm.vision.tower_weights import Tensors

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
# What a vision_config leaves to LLaVA's own defaults, where those are not the encoder's.
OF_CLIP = {"intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336}
OF_CLIP |= {"num_hidden_layers": 24, "num_attention_heads": 16}


@dataclasses.dataclass(frozen=True)
class LlavaConfig:
    """eyes: the encoder; keep: layers after which vectors are taken, () the last; later: layers of the file that do not
    run; width of vectors; activation between the products, and whether those have biases; taps: vectors of patches that
    one of the image's is made of where tiles are put together, 0: there are none; scale: of all vectors, where the
    text multiplies its embeddings and theirs (Granite)."""

    eyes: ClipConfig | SiglipTilesConfig
    keep: tuple[int, ...]
    later: int
    width: int
    activation: Activation
    bias: bool
    taps: int = 0
    scale: float = 1.0

    @property
    def tower(self) -> TowerConfig:
        return self.eyes.tower

    @property
    def tensors(self) -> Tensors:
        return without_last(self.tower.layers, self.later, "image_newline")

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        own = {"near": ((self.taps,), np.int32), "shares": ((self.taps,), np.float32)} if self.taps else {}
        return {**self.eyes.inputs, **own}

    def module(self, params: Params) -> nnx.Module:
        return LlavaEncoder(self, params)

    def names(self) -> Names:
        projector = "multi_modal_projector"
        return {
            **self.eyes.names("eyes", "vision_tower."),
            **linear_names("first", f"{projector}.linear_1", self.bias),
            **linear_names("second", f"{projector}.linear_2", self.bias),
            **({"newline": Tensor("image_newline")} if self.taps else {}),
        }


class LlavaEncoder(nnx.Module):
    """The encoder, two products, and with tiles "newline" [width], which stands at the end of each row."""

    def __init__(self, config: LlavaConfig, params: Params):
        self.config = config
        self.eyes = config.eyes.module(params)
        self.first = Linear(max(1, len(config.keep)) * config.tower.width, config.width, config.bias, params)
        self.second = Linear(config.width, config.width, config.bias, params)
        if config.taps:
            self.newline = params((config.width,), ("norm",), normal(config.width**-0.5))

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Of tiles the whole ones among the rows, and for each row what it says of `near` ones (0: the newline)."""
        each = self.config.eyes.across**2
        pixels = inputs["pixels"]
        pixels = pixels[: len(pixels) // each * each]
        x = self.eyes({"pixels": pixels}, count, execution, self.config.keep)
        x = activate(self.first(x, execution), self.config.activation)
        x = self.second(x, execution)
        if self.config.taps:
            x = jnp.concatenate([in_use(self.newline, execution)[None], x])
            x = shared(x, inputs["near"], inputs["shares"])
        return x * self.config.scale if self.config.scale != 1 else x


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight | None:
    """Of `model_type` llava with CLIP's encoder (LLaVA 1.5) or Pixtral's (Pixtral 12B). None: with another, or with the
    class token's vector."""
    kind = options["vision_config"].get("model_type", CLIP)
    strategy = options.get("vision_feature_select_strategy") or "default"
    if kind == "pixtral" and strategy == "full":
        return pixtral.sight(folder, options, asked)
    if kind != CLIP or strategy != "default":
        return None
    config = config_of(options, OF_CLIP)
    images = ClipImages.told(processing(folder, asked), config.eyes.patch * config.eyes.across, config.eyes.patch)
    token = token_of(options, 32_000)

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    return Sight(token, token, images, tokens, (config.eyes.across**2,), config)


def token_of(options: Mapping[str, Any], usual: int) -> int:
    """That stands for an image, by either name."""
    return options.get("image_token_index") or options.get("image_token_id") or usual


def config_of(options: Mapping[str, Any], usual: Mapping[str, Any], feature: int = -2, taps: int = 0) -> LlavaConfig:
    """By config.json; `usual`: what LLaVA's family has where its vision_config does not say, `feature` its
    vision_feature_layer. Raises ShardlmError for class tokens' vectors, and the first of SigLIP's left out."""
    told = {"model_type": CLIP, **usual, **options["vision_config"]}
    kind, strategy = told["model_type"], options.get("vision_feature_select_strategy")
    wanted = {CLIP: "default", SIGLIP: "full"}.get(kind)
    if wanted is None or (strategy or wanted) != wanted:
        raise ShardlmError(
            f"config.json has vision_feature_select_strategy={strategy!r} with an encoder {kind!r}; supported: "
            f"'default' with {CLIP}, 'full' with {SIGLIP}"
        )
    own = vision_options(told, kind)
    eyes = (ClipConfig if kind == CLIP else SiglipTilesConfig).told(own, told["image_size"])
    own.finish()
    all_layers, feature = eyes.tower.layers, options.get("vision_feature_layer", feature)
    several = feature if isinstance(feature, list | tuple) and len(feature) > 1 else ()
    used = [layers_used(all_layers, one) for one in several or [feature]]
    if len(set(used)) < len(used):
        raise ShardlmError(f"config.json has vision_feature_layer={feature} of {all_layers} layers, one of them twice")
    tower, text = dataclasses.replace(eyes.tower, layers=max(used)), text_config(options)
    scaled = text.get("model_type", "").startswith("granite")
    return LlavaConfig(
        eyes=dataclasses.replace(eyes, tower=tower),
        keep=tuple(one - 1 for one in used) if several else (),
        later=all_layers - max(used),
        width=text["hidden_size"],
        activation=activation_of(options.get("projector_hidden_act") or "gelu"),
        bias=bool(options.get("multimodal_projector_bias", True)),
        taps=taps,
        scale=float(text.get("embedding_multiplier") or 1.0) if scaled else 1.0,
    )
