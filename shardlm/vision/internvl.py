"""InternVL's encoder (https://arxiv.org/abs/2312.14238; https://arxiv.org/abs/2504.10479): tiles of one size, each with
a class token, layers with a factor on what they add, and two products of merged patches into the text's width."""

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
from shardlm.ops.swiglu import Activation, activate
from shardlm.vision.attending import Tiles
from shardlm.vision.images import places, processing, token_ids
from shardlm.vision.internvl_images import InternvlImages
from shardlm.vision.options import activation_of, layers_used, vision_options
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
    patch_names,
    with_class_tokens,
)
from shardlm.vision.tower_weights import Tensors

MERGER = NormConfig("layer", 1e-5)


@dataclasses.dataclass(frozen=True)
class InternvlConfig:
    """tower: its layers, one of `patch` pixels a side, `across` of which a tile has a side; last_norm: that after the
    last, if any; merge: patches a side that one vector is made of; width of vectors, activation between products."""

    tower: TowerConfig
    patch: int
    across: int
    last_norm: NormConfig | None
    merge: int
    width: int
    activation: Activation

    tensors = Tensors(("vision_tower.", "multi_modal_projector."), r"^vision_tower\.embeddings\.mask_token$")

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": ((self.patch, self.patch, 3), np.float32)}

    @property
    def order(self) -> np.ndarray:
        """The learned position of each patch, in the order of images.patches, and then of the class token: the first
        of them."""
        row, column = places(self.across, self.across, self.merge)
        return np.append(1 + row * self.across + column, 0)

    def module(self, params: Params) -> nnx.Module:
        return InternvlEncoder(self, params)

    def names(self) -> Names:
        embeddings, projector = "vision_tower.embeddings", "multi_modal_projector"
        last = self.last_norm and norm_names(self.last_norm, "last_norm", "vision_tower.layernorm")
        return {
            **patch_names("patches", f"{embeddings}.patch_embeddings.projection", bias=True),
            "of_class": Tensor(f"{embeddings}.cls_token", "1 1 D -> D"),
            "positions": Tensor(f"{embeddings}.position_embeddings", "1 P D -> P D"),
            **block_names(
                self.tower,
                "tower.block",
                "vision_tower.encoder.layer.{layer}.",
                attention_norm="layernorm_before",
                mlp_norm="layernorm_after",
                **{f"w{letter}": f"attention.{letter}_proj" for letter in "qkv"},
                wo="attention.projection_layer",
                up="mlp.fc1",
                down="mlp.fc2",
                attention_scale="lambda_1",
                mlp_scale="lambda_2",
            ),
            **(last or {}),
            **norm_names(MERGER, "norm", f"{projector}.layer_norm"),
            **linear_names("first", f"{projector}.linear_1", bias=True),
            **linear_names("second", f"{projector}.linear_2", bias=True),
        }


class InternvlEncoder(nnx.Module):
    """Patches, "of_class" [D], "positions" [places, D], tower, norms, and two products."""

    def __init__(self, config: InternvlConfig, params: Params):
        D, M = config.tower.width, config.merge**2
        self.config = config
        self.patches = Patches(config.patch, 3, D, True, params)
        self.of_class = params((D,), ("norm",), normal(D**-0.5))
        self.positions = params((config.across**2 + 1, D), (None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        if config.last_norm:
            self.last_norm = Norm(config.last_norm, D, params)
        self.norm = Norm(MERGER, M * D, params)
        self.first = Linear(M * D, config.width, True, params)
        self.second = Linear(config.width, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        each, D = self.config.across**2, self.config.tower.width
        learned = in_use(self.of_class, execution), in_use(self.positions, execution)[self.config.order]
        x = with_class_tokens(self.patches(inputs["pixels"], execution), each, *learned)
        x, _ = self.tower(x.reshape(-1, D), count, execution, windows=Tiles(each + 1))
        x = self.last_norm(x, execution) if self.config.last_norm else x
        x = x.reshape(-1, each + 1, D)[:, :-1].reshape(-1, self.config.merge**2 * D)
        x = self.first(self.norm(x, execution), execution)
        return self.second(activate(x, self.config.activation), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` internvl."""
    config = _config(options)
    images = InternvlImages.told(processing(folder, asked), config.patch * config.across, config.patch, config.merge)
    token = options.get("image_token_id") or 151_667
    begin, end = token_ids(folder, ("<img>", "</img>"))

    def tokens(picture) -> list[int]:
        return [begin, *[token] * picture.vectors, end]

    return Sight(token, token, images, tokens, tile_sizes(images.most, config.across**2), config, config.merge**2)


def _config(options: Mapping[str, Any]) -> InternvlConfig:
    told, feature = options["vision_config"], options.get("vision_feature_layer", -1)
    own = vision_options(told, "internvl_vision")
    own.aside("projection_dropout", "layer_scale_init_value", "use_mask_token")
    own.only("use_qk_norm", False)
    own.only("use_absolute_position_embeddings", True)
    own.only("norm_type", "layer_norm", "rms_norm")
    norm, eps = "rms" if own("norm_type", "") == "rms_norm" else "layer", own("layer_norm_eps", 1e-6)
    tower = TowerConfig(
        layers=layers_used(own("num_hidden_layers", 24), feature),
        width=own("hidden_size", 1024),
        heads=own("num_attention_heads", 16),
        mlp_dim=own("intermediate_size", 4096),
        norm=NormConfig(norm, eps),
        activation=activation_of(own("hidden_act", "gelu")),
        bias=bool(own("attention_bias", False)),
        scaled=True,
    )
    patch = _side(own("patch_size", 14))
    found = InternvlConfig(
        tower=tower,
        patch=patch,
        across=_side(told.get("image_size") or 448) // patch,
        last_norm=None if own("use_mean_pooling", True) or feature != -1 else NormConfig("layer", eps),
        merge=round(1 / (options.get("downsample_ratio") or 0.5)),
        width=text_config(options)["hidden_size"],
        activation=activation_of(options.get("projector_hidden_act") or "gelu"),
    )
    own.finish()
    return found


def _side(size: Any) -> int:
    return size if isinstance(size, int) else size[0]
