"""MiniMax M3's encoder (transformers' modeling_minimax_m3_vl.py is the definition): CLIP's layers on images of any
aspect ratio, of whose heads a third each would turn by time, row and column, and twice two products, of patches and of
squares."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import activate
from shardlm.vision.images import Pixels, processing, program_sizes, token_ids
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.qwen_images import QwenImages
from shardlm.vision.qwen_tower import of_bytes
from shardlm.vision.sight import Sight
from shardlm.vision.tower import Linear, Tower, TowerConfig, block_names, linear_names, norm_names, sines_of
from shardlm.vision.tower_weights import Tensors

SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584}  # pixels, where a folder does not say
NOT_SAID = [672, 672]  # which the published folder has and transformers takes for nothing said
AROUND = ("]<]start of image[>[", "]<]end of image[>[")


@dataclasses.dataclass(frozen=True)
class MinimaxConfig:
    """tower: its layers, on patches of `patch` pixels a side of so many `frames`, which an image repeats; pixels: how
    bytes become numbers; theta of the rotation; merge: patches a side that one vector is made of; inner: between
    products; width of vectors."""

    tower: TowerConfig
    pixels: Pixels
    patch: int
    frames: int
    theta: float
    merge: int
    inner: int
    width: int

    by_patch = ("first", "second")  # products ahead of the merging
    tensors = Tensors(
        ("vision_tower.", "multi_modal_projector."),
        r"^vision_tower\.rotary_emb\.",
        (
            (r"^model\.", ""),
            (r"^vision_tower\.vision_model\.", "vision_tower."),
            (r"^vision_tower\.embeddings\.patch_embedding\.", "vision_tower.embeddings.proj."),
            (r"^vision_tower\.encoder\.layers\.", "vision_tower.layers."),
            (r"^patch_merge_mlp\.linear_", "multi_modal_projector.merge_linear_"),
        ),
    )

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        pixels = ((self.patch, self.patch, 3), np.uint8)
        return {"pixels": pixels, "rows": ((), np.int32), "columns": ((), np.int32)}

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a row, and a column, of each rotated pair: the first third would turn by time, [2, pairs]."""
        third = self.tower.each // 3 // 2
        every = self.theta ** -(np.arange(third) / third)
        none = np.zeros(third)
        return np.stack([np.concatenate([none, every, none]), np.concatenate([none, none, every])])

    def module(self, params: Params) -> nnx.Module:
        return MinimaxEncoder(self, params)

    def names(self) -> Names:
        projector = "multi_modal_projector."
        products = {"first": "linear_1", "second": "linear_2", "third": "merge_linear_1", "last": "merge_linear_2"}
        found = {
            "patches": Tensor("vision_tower.embeddings.proj.weight", "D C T Y X -> T Y X C D"),
            **norm_names(self.tower.norm, "first_norm", "vision_tower.pre_layrnorm"),
            **block_names(
                self.tower,
                "tower.block",
                "vision_tower.layers.{layer}.",
                attention_norm="layer_norm1",
                mlp_norm="layer_norm2",
                **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
                wo="self_attn.out_proj",
                up="mlp.fc1",
                down="mlp.fc2",
            ),
        }
        for ours, theirs in products.items():
            found |= linear_names(ours, f"{projector}{theirs}", bias=True)
        return found


class MinimaxEncoder(nnx.Module):
    """Weights "patches" (frames, size, size, colours, D), norm, tower and four products."""

    def __init__(self, config: MinimaxConfig, params: Params):
        D, patch, W = config.tower.width, config.patch, config.width
        self.config = config
        shape, names = (config.frames, patch, patch, 3, D), (None, None, None, None, "norm")
        self.patches = params(shape, names, normal((config.frames * 3 * patch**2) ** -0.5), into=4)
        self.first_norm = Norm(config.tower.norm, D, params)
        self.tower = Tower(config.tower, params)
        self.first, self.second = Linear(D, config.inner, True, params), Linear(config.inner, W, True, params)
        self.third = Linear(config.merge**2 * W, config.inner, True, params)
        self.last = Linear(config.inner, W, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Inputs as qwen_images.QwenImages makes them; returns [P // merged, width]."""
        x = of_bytes(inputs["pixels"], self.config.pixels, in_use(self.patches, execution), execution)
        sines = sines_of((inputs["rows"], inputs["columns"]), self.config.frequencies)
        x, _ = self.tower(self.first_norm(x, execution), count, execution, sines)
        x = self.second(activate(self.first(x, execution), "gelu"), execution)
        x = x.reshape(-1, self.config.merge**2 * x.shape[-1])
        return self.last(activate(self.third(x, execution), "gelu"), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` minimax_m3_vl."""
    told = processing(folder, asked)
    told |= {"size": SIZE} if told.get("size", NOT_SAID) == NOT_SAID else {}
    config = _config(options)
    images = QwenImages.told(told, config.patch, config.merge, config.frames, 0, 0)
    config = dataclasses.replace(config, pixels=images.pixels)
    token = options.get("image_token_index") or options.get("image_token_id") or 200_025
    (begin, end), merged = token_ids(folder, AROUND), config.merge**2

    def tokens(picture) -> list[int]:
        return [begin, *[token] * picture.vectors, end]

    return Sight(token, token, images, tokens, program_sizes(images.most_patches, merged), config, merged)


def _config(options: Mapping[str, Any]) -> MinimaxConfig:
    own = vision_options(options["vision_config"], "minimax_m3_vl_vision")
    tower = TowerConfig(
        layers=own("num_hidden_layers", 32),
        width=own("hidden_size", 1280),
        heads=own("num_attention_heads", 16),
        mlp_dim=own("intermediate_size", 5120),
        norm=NormConfig("layer", own("layer_norm_eps", 1e-5)),
        activation=activation_of(own("hidden_act", "gelu")),
    )
    rope = {"rope_theta": own("rope_theta", 10_000.0)} | own("rope_parameters", {})
    found = MinimaxConfig(
        tower=tower,
        pixels=Pixels(),
        patch=own("patch_size", 14),
        frames=own("temporal_patch_size", 2),
        theta=float(rope["rope_theta"]),
        merge=own("spatial_merge_size", 2),
        inner=options.get("projector_hidden_size") or 6144,
        width=text_config(options)["hidden_size"],
    )
    own.finish()
    return found
