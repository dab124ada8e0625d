"""Gemma 4's encoder: patches of any aspect ratio, positions that are learned for rows and columns and turned by both,
Gemma's own layers in both directions, averages of neighbours, and a product into the text's width."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.vision.gemma4_images import Gemma4Images
from shardlm.vision.gemma4_tower import Gemma4TowerConfig
from shardlm.vision.images import processing
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.picture import Picture
from shardlm.vision.sight import Sight
from shardlm.vision.tower import Linear, Patches, Tower, linear_names
from shardlm.vision.tower_weights import Tensors


@dataclasses.dataclass(frozen=True)
class Gemma4Config:
    """tower: its layers, one of `patch` pixels a side; positions: rows, and columns, that are learned; pooled: patches
    a side that are averaged; standardised: whether averages are, by numbers of the checkpoint; width of vectors."""

    tower: Gemma4TowerConfig
    patch: int
    positions: int
    pooled: int
    standardised: bool
    width: int

    tensors = Tensors(("vision_tower.", "embed_vision."))

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {
            "pixels": ((self.patch, self.patch, 3), np.float32),
            "rows": ((), np.int32),
            "columns": ((), np.int32),
        }

    @property
    def norm(self) -> NormConfig:
        """Before the product."""
        return NormConfig("rms", self.tower.eps, scaled=False)

    def module(self, params: Params) -> nnx.Module:
        return Gemma4Encoder(self, params)

    def names(self) -> Names:
        embedder = "vision_tower.patch_embedder"
        standard = {f"standard_{part}": Tensor(f"vision_tower.std_{part}") for part in ("bias", "scale")}
        return {
            "patches.kernel": Tensor(f"{embedder}.input_proj.weight", "D (Y X C) -> Y X C D"),
            "positions": Tensor(f"{embedder}.position_embedding_table"),
            **self.tower.names("tower.block", "vision_tower.encoder.layers.{layer}."),
            **(standard if self.standardised else {}),
            **linear_names("out", "embed_vision.embedding_projection", bias=False),
        }


class Gemma4Encoder(nnx.Module):
    """Patches, "positions" [2, positions, D] of columns and of rows, tower, averages, and where it has them
    "standard_bias" and "standard_scale" [D], norm and product."""

    def __init__(self, config: Gemma4Config, params: Params):
        D = config.tower.width
        self.config = config
        self.patches = Patches(config.patch, 3, D, False, params)
        self.positions = params((2, config.positions, D), (None, None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        if config.standardised:
            self.standard_bias, self.standard_scale = (params((D,), ("norm",), normal(1.0)) for _ in range(2))
        self.norm = Norm(config.norm, D, params)
        self.out = Linear(D, config.width, False, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        of_column, of_row = in_use(self.positions, execution)
        x = self.patches(inputs["pixels"], execution) + of_column[inputs["columns"]] + of_row[inputs["rows"]]
        x, _ = self.tower(x, count, execution, self._sines(inputs["columns"], inputs["rows"]))
        x = x.reshape(-1, self.config.pooled**2, x.shape[-1]).astype(jnp.float32).mean(axis=1)
        x = x.astype(execution.dtype).astype(jnp.float32) * x.shape[-1] ** 0.5
        if self.config.standardised:
            bias, scale = (in_use(a, execution).astype(jnp.float32) for a in (self.standard_bias, self.standard_scale))
            x = (x - bias) * scale
        return self.out(self.norm(x.astype(execution.dtype), execution), execution)

    def _sines(self, *places: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32 [P, 1, 2, H / 4]: a half of each head turns by column, the other by row."""
        angle = jnp.stack(places, axis=1)[:, None, :, None] * self.config.tower.frequencies
        return jnp.sin(angle), jnp.cos(angle)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` gemma4."""
    config, told = _config(options), processing(folder, asked)
    images = Gemma4Images.told(told, config.patch, config.pooled)
    image, tokens = tokens_of(options)
    whole = text_config(options).get("use_bidirectional_attention") == "vision"
    return Sight(image, image, images, tokens, (images.most,), config, config.pooled**2, whole=whole)


def tokens_of(options: Mapping[str, Any]) -> tuple[int, Callable[[Picture], list[int]]]:
    """(the token of each vector, what gives all of a picture)."""
    begin, image, end = (
        options.get(f"{name}_token_id") or usual
        for name, usual in (("boi", 255_999), ("image", 258_880), ("eoi", 258_882))
    )

    def tokens(picture: Picture) -> list[int]:
        return [begin, *[image] * picture.vectors, end]

    return image, tokens


def _config(options: Mapping[str, Any]) -> Gemma4Config:
    own = vision_options(options["vision_config"], "gemma4_vision")
    own.aside("max_position_embeddings", "default_output_length", "global_head_dim")
    own.only("attention_bias", False)
    rope = {"rope_theta": own("rope_theta", 100.0), "rope_type": "axial"} | own("rope_parameters", {})
    tower = Gemma4TowerConfig(
        layers=own("num_hidden_layers", 16),
        width=own("hidden_size", 768),
        heads=own("num_attention_heads", 12),
        kv_heads=own("num_key_value_heads", 12),
        head_dim=own("head_dim", 64),
        mlp_dim=own("intermediate_size", 3072),
        eps=own("rms_norm_eps", 1e-6),
        activation=activation_of(own("hidden_activation", "gelu_pytorch_tanh")),
        theta=float(rope["rope_theta"]),
        clipped=bool(own("use_clipped_linears", False)),
    )
    found = Gemma4Config(
        tower=tower,
        patch=own("patch_size", 16),
        positions=own("position_embedding_size", 10 * 1024),
        pooled=own("pooling_kernel_size", 3),
        standardised=bool(own("standardize", False)),
        width=text_config(options)["hidden_size"],
    )
    own.finish()
    return found
