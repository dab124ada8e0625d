"""PaddleOCR-VL's encoder (https://arxiv.org/abs/2510.14528): SigLIP's layers on images of any aspect ratio, positions
that are learned and turned, and two products of merged patches into the text's width."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import activate
from shardlm.vision.images import Pixels, processing, program_sizes
from shardlm.vision.options import vision_options
from shardlm.vision.paddle_images import SIZE, PaddleImages
from shardlm.vision.qwen_tower import frequencies_of, half_by_half, of_bytes
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import OnSiglip, SiglipConfig
from shardlm.vision.tower import Linear, Patches, Tower, linear_names, norm_names, shared
from shardlm.vision.tower_weights import Tensors

MERGER = NormConfig("layer", 1e-5)


@dataclasses.dataclass(frozen=True)
class PaddleConfig(OnSiglip):
    """siglip, whose positions are `side` a side; pixels: how bytes become numbers; theta of the rotation; merge:
    patches a side that one vector is made of; width of vectors."""

    pixels: Pixels
    theta: float
    merge: int
    width: int

    tensors = Tensors(
        ("visual.", "projector."),
        r"^visual\.(vision_model\.head|(vision_model\.embeddings\.)?packing_position_embedding)\.",
        ((r"^model\.", ""), (r"^mlp_AR\.", "projector.")),
    )

    @property
    def side(self) -> int:
        """Learned positions of a side."""
        return math.isqrt(self.siglip.positions)

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        patch = self.siglip.patch
        places = {"rows": ((), np.int32), "columns": ((), np.int32)}
        return {
            "pixels": ((patch, patch, 3), np.uint8),
            **places,
            "near": ((4,), np.int32),
            "shares": ((4,), np.float32),
        }

    @property
    def frequencies(self) -> np.ndarray:
        """Of the rotation (frequencies_of)."""
        return frequencies_of(self.theta, self.tower.each)

    def module(self, params: Params) -> nnx.Module:
        return PaddleEncoder(self, params)

    def names(self) -> Names:
        own = self.siglip.names("", "visual.vision_model.")
        return {
            **{path.removeprefix("."): tensor for path, tensor in own.items()},
            **norm_names(MERGER, "norm", "projector.pre_norm"),
            **linear_names("first", "projector.linear_1", bias=True),
            **linear_names("second", "projector.linear_2", bias=True),
        }


class PaddleEncoder(nnx.Module):
    """Patches, "positions" [side ** 2, D], tower, norms and two products."""

    def __init__(self, config: PaddleConfig, params: Params):
        D, M = config.tower.width, config.merge**2
        self.config = config
        self.patches = Patches(config.siglip.patch, 3, D, True, params)
        self.positions = params((config.siglip.positions, D), (None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        self.last_norm = Norm(config.tower.norm, D, params)
        self.norm = Norm(MERGER, D, params)
        self.first = Linear(M * D, M * D, True, params)
        self.second = Linear(M * D, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Inputs as paddle_images.PaddleImages makes them."""
        config, kernel = self.config, in_use(self.patches.kernel, execution)
        x = of_bytes(inputs["pixels"], config.pixels, kernel[None], execution) + in_use(self.patches.bias, execution)
        learned = shared(in_use(self.positions, execution).astype(jnp.float32), inputs["near"], inputs["shares"])
        sines = half_by_half(inputs["rows"], inputs["columns"], config.frequencies)
        x, _ = self.tower(x + learned.astype(x.dtype), count, execution, sines)
        x = self.norm(self.last_norm(x, execution), execution).reshape(-1, config.merge**2 * x.shape[-1])
        return self.second(activate(self.first(x, execution), "gelu"), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` paddleocr_vl."""
    told, processed = options["vision_config"], {"size": SIZE, **processing(folder, asked)}
    own = vision_options(told, "paddleocr_vl_vision")
    own.aside("tokens_per_second")
    own.only("temporal_patch_size", 1, 2)  # of videos
    siglip = SiglipConfig.told(own, told.get("image_size") or 384, patch=14, width=1152, heads=16)
    merge, rope = own("spatial_merge_size", 2), own("rope_parameters", {})
    own.finish()
    side = math.isqrt(siglip.positions)
    images = PaddleImages.told(processed, siglip.patch, merge, 1, 0, side)
    config = PaddleConfig(
        siglip, images.pixels, float(rope.get("rope_theta", 10_000.0)), merge, text_config(options)["hidden_size"]
    )
    token, merged = options.get("image_token_id") or 100_295, merge**2

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    return Sight(token, token, images, tokens, program_sizes(images.most_patches, merged), config, merged, axes=True)
