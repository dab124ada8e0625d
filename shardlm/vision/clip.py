"""CLIP's encoder (https://arxiv.org/abs/2103.00020) as LLaVA reads it (https://arxiv.org/abs/2310.03744): squares of
one size, a class token, learned positions, and two products into the text's width."""

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
from shardlm.ops.swiglu import Activation, activate
from shardlm.vision.clip_images import ClipImages
from shardlm.vision.images import processing
from shardlm.vision.options import activation_of, layers_used, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.tower import Linear, Patches, Tower, TowerConfig, block_names, linear_names, norm_names, patch_names
from shardlm.vision.tower_weights import Tensors


@dataclasses.dataclass(frozen=True)
class ClipConfig:
    """tower: its layers, one of `patch` pixels a side, `across` of which an image has a side; width of vectors;
    activation between the products, and whether those have biases; later: layers after the last that runs."""

    tower: TowerConfig
    patch: int
    across: int
    width: int
    activation: Activation
    bias: bool
    later: int

    @property
    def tensors(self) -> Tensors:
        """Layers after the last that runs, and the norm behind them, are left aside."""
        last = "|".join(map(str, range(self.tower.layers, self.tower.layers + self.later)))
        later = rf"^vision_tower\.(post_layernorm\.|embeddings\.position_ids$|encoder\.layers\.({last})\.)"
        return Tensors(
            ("vision_tower.", "multi_modal_projector."),
            later,
            ((r"^model\.", ""), (r"^vision_tower\.vision_model\.", "vision_tower.")),
        )

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {"pixels": ((self.patch, self.patch, 3), np.float32)}

    def module(self, params: Params) -> nnx.Module:
        return ClipEncoder(self, params)

    def names(self) -> Names:
        norm, projector = self.tower.norm, "multi_modal_projector"
        return {
            **patch_names("patches", "vision_tower.embeddings.patch_embedding", bias=False),
            "of_class": Tensor("vision_tower.embeddings.class_embedding"),
            "positions": Tensor("vision_tower.embeddings.position_embedding.weight"),
            **norm_names(norm, "first_norm", "vision_tower.pre_layrnorm"),
            **block_names(
                self.tower,
                "tower.block",
                "vision_tower.encoder.layers.{layer}.",
                attention_norm="layer_norm1",
                mlp_norm="layer_norm2",
                **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
                wo="self_attn.out_proj",
                up="mlp.fc1",
                down="mlp.fc2",
            ),
            **linear_names("first", f"{projector}.linear_1", self.bias),
            **linear_names("second", f"{projector}.linear_2", self.bias),
        }


class ClipEncoder(nnx.Module):
    """Patches, "of_class" [D], "positions" [1 + places, D] with the class token's first, norm, tower, two products."""

    def __init__(self, config: ClipConfig, params: Params):
        D = config.tower.width
        self.config = config
        self.patches = Patches(config.patch, 3, D, False, params)
        self.of_class = params((D,), ("norm",), normal(D**-0.5))
        self.positions = params((config.across**2 + 1, D), (None, "norm"), normal(D**-0.5))
        self.first_norm = Norm(config.tower.norm, D, params)
        self.tower = Tower(config.tower, params)
        self.first = Linear(D, config.width, config.bias, params)
        self.second = Linear(config.width, config.width, config.bias, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        x = self.patches(inputs["pixels"], execution)
        x = jnp.concatenate([in_use(self.of_class, execution)[None], x]) + in_use(self.positions, execution)
        x, _ = self.tower(self.first_norm(x, execution), count + 1, execution)
        x = self.first(x[1:], execution)
        return self.second(activate(x, self.config.activation), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` llava with CLIP's encoder."""
    config = _config(options)
    images = ClipImages.told(processing(folder, asked), config.patch * config.across, config.patch)
    token = options.get("image_token_index") or options.get("image_token_id") or 32_000

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    return Sight(token, token, images, tokens, (config.across**2,), config)


def _config(options: Mapping[str, Any]) -> ClipConfig:
    # Whatever LlavaConfig leaves out of vision_config is that of LLaVA 1.5's.
    usual = {"intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336}
    usual |= {"num_hidden_layers": 24, "num_attention_heads": 16}
    told = usual | dict(options["vision_config"])
    own = vision_options(told, "clip_vision_model")
    own.aside("vocab_size")
    layers = layers_used(own("num_hidden_layers"), options.get("vision_feature_layer", -2))
    tower = TowerConfig(
        layers=layers,
        width=own("hidden_size"),
        heads=own("num_attention_heads"),
        mlp_dim=own("intermediate_size"),
        norm=NormConfig("layer", own("layer_norm_eps", 1e-5)),
        activation=activation_of(own("hidden_act", "quick_gelu")),
    )
    found = ClipConfig(
        tower=tower,
        patch=own("patch_size"),
        across=told["image_size"] // told["patch_size"],
        width=text_config(options)["hidden_size"],
        activation=activation_of(options.get("projector_hidden_act") or "gelu"),
        bias=options.get("multimodal_projector_bias", True),
        later=told["num_hidden_layers"] - layers,
    )
    own.finish()
    return found
