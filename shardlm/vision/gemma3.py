"""Gemma 3's encoder (https://arxiv.org/abs/2503.19786, section 2.2): SigLIP on squares of one size, averages of
neighbours, and a norm and a product into the text's width. Its vectors take the place of embeddings after those were
scaled. "Pan and scan", which cuts long images, is off as in transformers."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.vision.images import BILINEAR, newlines, processing
from shardlm.vision.options import vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import WITH_PROJECTOR, OnSiglip, Siglip, SiglipConfig
from shardlm.vision.square_images import SquareImages
from shardlm.vision.tower import norm_names


@dataclasses.dataclass(frozen=True)
class Gemma3Config(OnSiglip):
    """siglip; pooled: patches a side that are averaged; width of vectors."""

    pooled: int
    width: int

    tensors = WITH_PROJECTOR

    @property
    def norm(self) -> NormConfig:
        """Before the product."""
        return NormConfig("rms", self.siglip.tower.norm.eps, offset=1.0)

    def module(self, params: Params) -> nnx.Module:
        return Gemma3Encoder(self, params)

    def names(self) -> Names:
        projector = "multi_modal_projector"
        return {
            **self.siglip.names("siglip", "vision_tower."),
            **norm_names(self.norm, "norm", f"{projector}.mm_soft_emb_norm"),
            "out": Tensor(f"{projector}.mm_input_projection_weight"),
        }


class Gemma3Encoder(nnx.Module):
    """SigLIP, averages, norm and "out" [D, width]."""

    def __init__(self, config: Gemma3Config, params: Params):
        D = config.siglip.tower.width
        self.config = config
        self.siglip = Siglip(config.siglip, params)
        self.norm = Norm(config.norm, D, params)
        self.out = params((D, config.width), (None, "norm"), normal(D**-0.5), into=1)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        x = self.siglip(inputs, count, execution)
        x = x.reshape(-1, self.config.pooled**2, x.shape[-1]).mean(axis=1)
        return jnp.einsum("pd,df->pf", self.norm(x, execution), in_use(self.out, execution))


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` gemma3. Two line ends stand before and after an image."""
    told = options["vision_config"]
    own, side = vision_options(told, "siglip_vision_model"), told.get("image_size") or 224
    siglip = SiglipConfig.told(own, side)
    own.finish()
    each = side // siglip.patch
    pooled = each // math.isqrt(options.get("mm_tokens_per_image") or 256)
    images = SquareImages.told(processing(folder, asked), side, siglip.patch, pooled, resample=BILINEAR)
    image, begin, end = (
        options.get(f"{name}_token_index") or options.get(f"{name}_token_id") or usual
        for name, usual in (("image", 262_144), ("boi", 255_999), ("eoi", 256_000))
    )
    lines = newlines(folder)

    def tokens(picture) -> list[int]:
        return [lines[2], begin, *[image] * picture.vectors, end, lines[2]]

    config = Gemma3Config(siglip, pooled, text_config(options)["hidden_size"])
    joins = {(many, 2): many + 2 for many in lines if many + 2 in lines}
    joins |= {(2, many): both for (many, _), both in joins.items()}
    return Sight(
        begin,
        image,
        images,
        tokens,
        (each**2,),
        config,
        pooled**2,
        whole=True,
        joins={(lines[a], lines[b]): lines[both] for (a, b), both in joins.items()},
    )
