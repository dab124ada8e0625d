"""LFM2-VL's encoder (https://arxiv.org/abs/2511.23404): SigLIP 2 (https://arxiv.org/abs/2502.14786, NaFlex), whose
learned positions are brought to each part of an image, and two products of merged patches into the text's width."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.models.naming import Names, Tensor
from shardlm.models.text_parts import text_config
from shardlm.ops.swiglu import Activation, activate
from shardlm.vision.attending import Windows
from shardlm.vision.images import processing, program_sizes, token_ids
from shardlm.vision.lfm2_images import Lfm2Images
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.siglip import WITH_PROJECTOR, OnSiglip, SiglipConfig
from shardlm.vision.tower import Linear, Patches, Tower, linear_names, norm_names

MERGER = NormConfig("layer", 1e-5)
START, END, WHOLE = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclasses.dataclass(frozen=True)
class Lfm2Config(OnSiglip):
    """siglip, whose positions are `learned` a side; longest: patches of a part at most; merge: patches a side that one
    vector is made of; inner: width between the products, their activation and whether they have biases; normed: whether
    there is a norm before them; width of vectors."""

    learned: int
    longest: int
    merge: int
    inner: int
    activation: Activation
    bias: bool
    normed: bool
    width: int

    tensors = WITH_PROJECTOR

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        shares = ((self.learned,), np.float32)
        pixels = self.siglip.inputs["pixels"]
        return {"pixels": pixels, "windows": ((), np.int32), "rows": shares, "columns": shares}

    def module(self, params: Params) -> nnx.Module:
        return Lfm2Encoder(self, params)

    def names(self) -> Names:
        own, projector = self.siglip.names("", "vision_tower."), "multi_modal_projector"
        own = {path.removeprefix("."): tensor for path, tensor in own.items()}
        kernel = Tensor(own["patches.kernel"].name, "D (Y X C) -> Y X C D")
        return {
            **own,
            "patches.kernel": kernel,
            **(norm_names(MERGER, "norm", f"{projector}.layer_norm") if self.normed else {}),
            **linear_names("first", f"{projector}.linear_1", self.bias),
            **linear_names("second", f"{projector}.linear_2", self.bias),
        }


class Lfm2Encoder(nnx.Module):
    """Patches, "positions" [learned ** 2, D], tower, norms and two products."""

    def __init__(self, config: Lfm2Config, params: Params):
        D, M = config.tower.width, config.merge**2
        self.config = config
        self.patches = Patches(config.siglip.patch, 3, D, True, params)
        self.positions = params((config.learned**2, D), (None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        self.last_norm = Norm(config.tower.norm, D, params)
        if config.normed:
            self.norm = Norm(MERGER, M * D, params)
        self.first = Linear(M * D, config.inner, config.bias, params)
        self.second = Linear(config.inner, config.width, config.bias, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Inputs as lfm2_images.Lfm2Images makes them."""
        config = self.config
        shares = inputs["rows"][:, :, None] * inputs["columns"][:, None]
        table, exact = in_use(self.positions, execution).astype(jnp.float32), jax.lax.Precision.HIGHEST
        places = jnp.einsum("pn,nd->pd", shares.reshape(len(shares), -1), table, precision=exact)
        x = self.patches(inputs["pixels"], execution)
        windows = Windows(inputs["windows"], config.longest)
        alone = inputs["windows"][jnp.maximum(count, 1) - 1] == 0  # of one part, which all patches see
        x, _ = self.tower(x + places.astype(x.dtype), count, execution, windows=windows, everywhere=alone)
        x = self.last_norm(x, execution).reshape(-1, config.merge**2 * x.shape[-1])
        x = self.norm(x, execution) if config.normed else x
        return self.second(activate(self.first(x, execution), config.activation), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` lfm2_vl. Tokens say of each tile where it stands."""
    told = processing(folder, asked)
    own, merge = vision_options(options["vision_config"], "siglip2_vision_model"), options.get("downsample_factor") or 2
    positions = own("num_patches", 256)
    learned = math.isqrt(positions)
    if learned**2 != positions:
        raise ShardlmError(f"config.json has num_patches={positions} in vision_config; it needs a square")
    siglip = SiglipConfig.told(own, 16)
    own.finish()
    siglip = dataclasses.replace(siglip, positions=positions)
    images = Lfm2Images.told(told, siglip.patch, merge, learned)
    config = Lfm2Config(
        siglip=siglip,
        learned=learned,
        longest=images.longest,
        merge=merge,
        inner=options.get("projector_hidden_size") or 2560,
        activation=activation_of(options.get("projector_hidden_act") or "gelu"),
        bias=options.get("projector_bias") is not False,
        normed=options.get("projector_use_layernorm") is not False,
        width=text_config(options)["hidden_size"],
    )
    token = options.get("image_token_id") or 396
    sizes = program_sizes(images.most_patches, merge**2)
    return Sight(token, token, images, _tokens(folder, told, images, token), sizes, config, merge**2)


def _tokens(folder: pathlib.Path, told: Mapping[str, Any], images: Lfm2Images, token: int):
    """What stands for a picture."""
    named = told.get("use_image_special_tokens") is not False
    start, end, whole = ([id] for id in token_ids(folder, (START, END, WHOLE))) if named else ([], [], [])
    most, place = images.tiles[1], {}
    if named and most > 1:
        pairs = [(r, c) for r in range(1, most + 1) for c in range(1, most + 1) if r * c <= most]
        ids = token_ids(folder, [f"<|img_row_{r}_col_{c}|>" for r, c in pairs])
        place = dict(zip(pairs, ([id] for id in ids), strict=True))

    def tokens(picture) -> list[int]:
        (rows, columns), found, left = picture.tiles, [], picture.vectors
        for row, column in np.ndindex(rows, columns) if rows * columns > 1 else ():
            found += [*place.get((row + 1, column + 1), []), *[token] * images.of_tile]
            left -= images.of_tile
        found += [*(whole if found and left else []), *[token] * left]
        return [*start, *found, *end]

    return tokens
