"""How Gemma 4 12B sees (`gemma4_unified`; transformers' modeling_gemma4_unified.py is the definition), which has no
layers for it: squares of pixels by a product between norms, with positions that are learned for rows and columns."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.vision import gemma4
from shardlm.vision.gemma4_images import Gemma4Images
from shardlm.vision.images import processing
from shardlm.vision.options import vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.tower import Linear, TowerConfig, linear_names, norm_names
from shardlm.vision.tower_weights import Tensors

NORM = NormConfig("layer", 1e-5)


@dataclasses.dataclass(frozen=True)
class UnifiedConfig:
    """side: pixels of a square's; inner: width of the first product; positions: rows, and columns, that are learned;
    eps of the last norm; width of vectors."""

    side: int
    inner: int
    positions: int
    eps: float
    width: int

    tensors = Tensors(
        ("vision_embedder.", "embed_vision."),
        renames=(
            (r"^model\.", ""),
            (r"^embed_vision\.(patch_|pos_)", r"vision_embedder.\1"),  # as transformers has them in memory
            (r"^embed_vision\.multimodal_embedder\.", "embed_vision."),
        ),
    )

    @property
    def tower(self) -> TowerConfig:
        """None of its layers."""
        return TowerConfig(0, self.inner, 1, self.inner, head_dim=64)

    @property
    def norm(self) -> NormConfig:
        """Before the second product."""
        return NormConfig("rms", self.eps, scaled=False)

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": ((self.side, self.side, 3), np.float32), "rows": ((), np.int32), "columns": ((), np.int32)}

    def module(self, params: Params) -> nnx.Module:
        return UnifiedEncoder(self, params)

    def names(self) -> Names:
        theirs = {"pixel_norm": "patch_ln1", "patch_norm": "patch_ln2", "position_norm": "pos_norm"}
        found = {}
        for ours, name in theirs.items():
            found |= norm_names(NORM, ours, f"vision_embedder.{name}")
        return {
            **found,
            **linear_names("patches", "vision_embedder.patch_dense", bias=True),
            "positions": Tensor("vision_embedder.pos_embedding"),
            **linear_names("out", "embed_vision.embedding_projection", bias=False),
        }


class UnifiedEncoder(nnx.Module):
    """Norms, two products, and "positions" [positions, 2, inner] of columns and of rows."""

    def __init__(self, config: UnifiedConfig, params: Params):
        numbers, D = config.side**2 * 3, config.inner
        self.pixel_norm = Norm(NORM, numbers, params)
        self.patches = Linear(numbers, D, True, params)
        self.patch_norm, self.position_norm = (Norm(NORM, D, params) for _ in range(2))
        self.positions = params((config.positions, 2, D), (None, None, "norm"), normal(D**-0.5))
        self.norm = Norm(config.norm, D, params)
        self.out = Linear(D, config.width, False, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        pixels, learned = inputs["pixels"].astype(execution.dtype), in_use(self.positions, execution)
        x = self.patches(self.pixel_norm(pixels.reshape(len(pixels), -1), execution), execution)
        x = self.patch_norm(x, execution) + learned[inputs["columns"], 0] + learned[inputs["rows"], 1]
        return self.out(self.norm(self.position_norm(x, execution), execution), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` gemma4_unified."""
    own, width = vision_options(options["vision_config"], "gemma4_unified_vision"), text_config(options)["hidden_size"]
    patch, merge = own("patch_size", 16), own("pooling_kernel_size", 3)
    own.only("model_patch_size", patch * merge)
    inner = own("mm_embed_dim", 3840)
    own.only("output_proj_dims", inner)
    config = UnifiedConfig(patch * merge, inner, own("mm_posemb_size", 1120), own("rms_norm_eps", 1e-6), width)
    own.finish()
    images = Gemma4Images.told(processing(folder, asked), patch, merge, whole=True)
    if images.squares > config.positions:
        raise ShardlmError(
            f"the folder makes up to {images.squares} squares of an image, and its model has mm_posemb_size="
            f"{config.positions} positions; set max_soft_tokens to that at most"
        )
    image, tokens = gemma4.tokens_of(options)
    whole = text_config(options).get("use_bidirectional_attention") == "vision"
    return Sight(image, image, images, tokens, (images.squares,), config, whole=whole)
