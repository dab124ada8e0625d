"""Llama 4's encoder: tiles of one size, each with a class token behind its patches, positions that are learned and
turned by row and column, and two products of four patches and one into the text's width."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import activate
from shardlm.vision.attending import Tiles
from shardlm.vision.images import places, processing, token_ids
from shardlm.vision.llama4_images import Llama4Images
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.tiles import tile_sizes
from shardlm.vision.tower import (
    Linear,
    Patches,
    Tower,
    TowerConfig,
    block_names,
    linear_names,
    norm_names,
    sines_of,
    with_class_tokens,
)
from shardlm.vision.tower_weights import Tensors

NORM = NormConfig("layer", 1e-5)
TOKENS = ("<|image_start|>", "<|image|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")


@dataclasses.dataclass(frozen=True)
class Llama4Config:
    """tower: its layers, one of `patch` pixels a side, `across` of which a tile has a side; theta of the rotation;
    merge: patches a side that one vector is made of; inner: width between products; width of vectors."""

    tower: TowerConfig
    patch: int
    across: int
    theta: float
    merge: int
    inner: int
    width: int

    tensors = Tensors(("vision_model.", "multi_modal_projector."), r"\.rotary_embedding\.freqs_ci$")

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": ((self.patch, self.patch, 3), np.float32)}

    @property
    def angles(self) -> np.ndarray:
        """(row, column) of each place in a tile in the order of its patches, from 1, and of the class token, which does
        not turn: int32 [2, across ** 2 + 1]."""
        found = 1 + np.stack(places(self.across, self.across, self.merge))
        return np.pad(found, [(0, 0), (0, 1)])

    @property
    def order(self) -> np.ndarray:
        """The learned position of each, row by row with the class token's behind."""
        row, column = places(self.across, self.across, self.merge)
        return np.append(row * self.across + column, self.across**2)

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a row, and a column, of each rotated pair: half turn by column, half by row, [2, H / 2]."""
        half = self.tower.each // 2
        every = self.theta ** -(np.arange(0, half, 2) / half)
        none = np.zeros_like(every)
        return np.stack([np.concatenate([none, every]), np.concatenate([every, none])])

    def module(self, params: Params) -> nnx.Module:
        return Llama4Encoder(self, params)

    def names(self) -> Names:
        blocks = block_names(
            self.tower,
            "tower.block",
            "vision_model.model.layers.{layer}.",
            attention_norm="input_layernorm",
            mlp_norm="post_attention_layernorm",
            **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkvo"},
            up="mlp.fc1",
            down="mlp.fc2",
        )
        pairs = ("H", 0, self.tower.each)  # side by side
        turned = [f"tower.block.{name}" for name in ("wq", "wk", "bq", "bk")]
        return {
            "patches.kernel": Tensor("vision_model.patch_embedding.linear.weight", "D (C Y X) -> Y X C D"),
            "of_class": Tensor("vision_model.class_embedding"),
            "positions": Tensor("vision_model.positional_embedding_vlm"),
            **norm_names(NORM, "first_norm", "vision_model.layernorm_pre"),
            **blocks,
            **{path: dataclasses.replace(blocks[path], pairs=pairs) for path in turned},
            **norm_names(NORM, "last_norm", "vision_model.layernorm_post"),
            **linear_names("first", "vision_model.vision_adapter.mlp.fc1", bias=False),
            **linear_names("second", "vision_model.vision_adapter.mlp.fc2", bias=False),
            **linear_names("out", "multi_modal_projector.linear_1", bias=False),
        }


class Llama4Encoder(nnx.Module):
    """Patches, "of_class" [D], "positions" [places, D], norms, tower, and three products."""

    def __init__(self, config: Llama4Config, params: Params):
        D, M = config.tower.width, config.merge**2
        self.config = config
        self.patches = Patches(config.patch, 3, D, False, params)
        self.of_class = params((D,), ("norm",), normal(D**-0.5))
        self.positions = params((config.across**2 + 1, D), (None, "norm"), normal(D**-0.5))
        self.first_norm, self.last_norm = (Norm(NORM, D, params) for _ in range(2))
        self.tower = Tower(config.tower, params)
        self.first = Linear(M * D, config.inner, False, params)
        self.second = Linear(config.inner, config.inner, False, params)
        self.out = Linear(config.inner, config.width, False, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        each, D = self.config.across**2, self.config.tower.width
        learned = in_use(self.of_class, execution), in_use(self.positions, execution)[self.config.order]
        x = with_class_tokens(self.patches(inputs["pixels"], execution), each, *learned)
        tiles, x = len(x), self.first_norm(x.reshape(-1, D), execution)
        sines = sines_of(jnp.tile(self.config.angles, tiles), self.config.frequencies)
        x, _ = self.tower(x, count, execution, sines, Tiles(each + 1))
        x = self.last_norm(x, execution).reshape(tiles, each + 1, D)[:, :-1]
        x = x.reshape(-1, self.config.merge**2 * D)
        for product in (self.first, self.second):
            x = activate(product(x, execution), "gelu")
        return self.out(x, execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` llama4."""
    config = _config(options)
    images = Llama4Images.told(processing(folder, asked), config.patch * config.across, config.patch, config.merge)
    begin, image, end, beside, below = token_ids(folder, TOKENS)
    vector = options.get("image_token_index") or options.get("image_token_id") or 200_092

    def tokens(picture) -> list[int]:
        (rows, columns), own = picture.tiles, [vector] * picture.grid[1]
        row = [*([*own, beside] * columns)[:-1], below]
        return [begin, *(row * rows if rows * columns > 1 else ()), image, *own, end]

    sizes = tile_sizes(images.most, config.across**2)
    return Sight(image, vector, images, tokens, sizes, config, config.merge**2)


def _config(options: Mapping[str, Any]) -> Llama4Config:
    told = options["vision_config"]
    own = vision_options(told, "llama4_vision_model")
    own.aside("norm_eps", "projector_dropout", "vision_feature_layer")
    own.only("vision_feature_select_strategy", "default")
    own.only("multi_modal_projector_bias", False)
    own.only("hidden_act", "gelu")
    hidden, patch = own("intermediate_size", 5632), own("patch_size", 14)
    tower = TowerConfig(
        layers=own("num_hidden_layers", 34),
        width=own("hidden_size", 768),
        heads=own("num_attention_heads", 16),
        mlp_dim=hidden,
        norm=NORM,
        activation=activation_of("gelu"),
    )
    merge = round(1 / own("pixel_shuffle_ratio", 0.5))
    inner = own("projector_input_dim", 4096)
    for name in ("projector_output_dim", "vision_output_dim"):
        own.only(name, inner)
    rope = {"rope_theta": own("rope_theta", 10_000.0)} | own("rope_parameters", {})
    found = Llama4Config(
        tower=tower,
        patch=patch,
        across=(told.get("image_size") or 448) // patch,
        theta=float(rope["rope_theta"]),
        merge=merge,
        inner=inner,
        width=text_config(options)["hidden_size"],
    )
    if hidden != merge**2 * tower.width:
        own.only("intermediate_size", merge**2 * tower.width)
    own.finish()
    return found
