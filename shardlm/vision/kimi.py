"""Kimi K2.5's encoder, MoonViT (https://arxiv.org/abs/2504.07491, section 2.1): images as large as they are, positions
that are learned and interpolated, rotations by rows and columns, and a product of merged patches into the width of the
text."""

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
from shardlm.vision.images import processing, program_sizes
from shardlm.vision.kimi_images import KimiImages
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.sight import Sight
from shardlm.vision.tower import (
    Linear,
    Patches,
    Tower,
    TowerConfig,
    block_names,
    linear_names,
    norm_names,
    patch_names,
    shared,
    sines_of,
)
from shardlm.vision.tower_weights import Tensors

NORM = NormConfig("layer", 1e-5)
# Of Moonshot's own files, and what transformers calls it.
NAMES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
}
ONLY = {"merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed"}


@dataclasses.dataclass(frozen=True)
class KimiConfig:
    """tower: its layers, one of `patch` pixels a side; learned: rows and columns of positions; theta of the rotation;
    merge: patches a side that one vector is made of; width of vectors; eps of the norm before the product."""

    tower: TowerConfig
    patch: int
    learned: tuple[int, int]
    theta: float
    merge: int
    width: int
    eps: float

    tensors = Tensors(
        ("vision_tower.", "mm_projector."),
        r"\.pos_emb\.time_weight$",
        ((r"^model\.", ""), (r"^vision_tower\.encoder\.patch_embed\.", "vision_tower.patch_embed.")),
    )

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {
            "pixels": ((self.patch, self.patch, 3), np.float32),
            "rows": ((), np.int32),
            "columns": ((), np.int32),
            "near": ((16,), np.int32),
            "shares": ((16,), np.float32),
        }

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a row, and a column, of each rotated pair, which turn by column and by row in turn: [2, H / 2]."""
        half = self.tower.each // 2
        every = self.theta ** -(np.arange(0, half, 2) / half)
        none = np.zeros_like(every)
        return np.stack([np.stack(pair, axis=1).ravel() for pair in ((none, every), (every, none))])

    def module(self, params: Params) -> nnx.Module:
        return KimiEncoder(self, params)

    def names(self) -> Names:
        prefix = "vision_tower.encoder.blocks.{layer}."
        blocks = block_names(
            self.tower,
            "tower.block",
            prefix,
            attention_norm="norm0",
            mlp_norm="norm1",
            **{f"w{letter}": "wqkv" for letter in "qkv"},
            wo="wo",
            up="mlp.fc0",
            down="mlp.fc1",
        )
        return {
            **patch_names("patches", "vision_tower.patch_embed.proj", bias=True),
            "positions": Tensor("vision_tower.patch_embed.pos_emb.weight"),
            **blocks,
            **self._fused(blocks),
            **norm_names(NORM, "last_norm", "vision_tower.encoder.final_layernorm"),
            **norm_names(NORM, "norm", "mm_projector.pre_norm"),
            **linear_names("first", "mm_projector.proj.0", bias=True),
            **linear_names("second", "mm_projector.proj.2", bias=True),
        }

    def _fused(self, blocks: Names) -> Names:
        """Queries, keys and values, which are one tensor, with rotated pairs side by side."""
        found, width = {}, self.tower.width
        for place, letter in enumerate("qkv"):
            part = (0, place * width, (place + 1) * width, 1)
            pairs = None if letter == "v" else ("H", 0, self.tower.each)
            for path in (f"tower.block.w{letter}", f"tower.block.b{letter}"):
                found[path] = dataclasses.replace(blocks[path], part=part, pairs=pairs)
        return found


class KimiEncoder(nnx.Module):
    """Patches, "positions" [rows, columns, D], tower, norms, and two products of merged patches."""

    def __init__(self, config: KimiConfig, params: Params):
        D, M = config.tower.width, config.merge**2
        self.config = config
        self.patches = Patches(config.patch, 3, D, True, params)
        self.positions = params((*config.learned, D), (None, None, "norm"), normal(D**-0.5))
        self.tower = Tower(config.tower, params)
        self.last_norm = Norm(NORM, D, params)
        self.norm = Norm(dataclasses.replace(NORM, eps=config.eps), D, params)
        self.first = Linear(M * D, M * D, True, params)
        self.second = Linear(M * D, config.width, True, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        table = in_use(self.positions, execution)
        learned = shared(table.reshape(-1, table.shape[-1]), inputs["near"], inputs["shares"])
        x = self.patches(inputs["pixels"], execution) + learned
        sines = sines_of((inputs["rows"], inputs["columns"]), self.config.frequencies)
        x, _ = self.tower(x, count, execution, sines)
        x = self.norm(self.last_norm(x, execution), execution)
        x = self.first(x.reshape(-1, self.config.merge**2 * x.shape[-1]), execution)
        return self.second(activate(x, "gelu"), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` kimi_k25."""
    config = _config(options)
    images = KimiImages.told(processing(folder, asked), config.patch, config.merge, config.learned)
    token = options.get("image_token_id") or options.get("media_placeholder_token_id") or 163_605
    merged = config.merge**2

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    # What is added to whole squares may be more than the limit.
    most = images.most + 2 * images.longest * config.merge
    return Sight(token, token, images, tokens, program_sizes(most, merged), config, merged)


def _config(options: Mapping[str, Any]) -> KimiConfig:
    told = options["vision_config"]
    own = vision_options({NAMES.get(name, name): value for name, value in told.items()}, "kimi_k25_vision")
    own.aside("pos_emb_time", "text_hidden_size", "mm_hidden_size", "video_attn_type", "_attn_implementation")
    for name, value in ONLY.items():
        own.only(name, value)
    own.only("projector_hidden_act", "gelu")
    merge = own("merge_kernel_size", (2, 2))
    tower = TowerConfig(
        layers=own("num_hidden_layers", 27),
        width=own("hidden_size", 1152),
        heads=own("num_attention_heads", 16),
        mlp_dim=own("intermediate_size", 4304),
        norm=NORM,
        activation=activation_of(own("hidden_act", "gelu_pytorch_tanh")),
    )
    rope = {"rope_theta": 10_000.0} | own("rope_parameters", {})
    found = KimiConfig(
        tower=tower,
        patch=own("patch_size", 14),
        learned=(own("pos_emb_height", 64), own("pos_emb_width", 64)),
        theta=float(rope["rope_theta"]),
        merge=merge[0],
        width=text_config(options)["hidden_size"],
        eps=own("projector_ln_eps", options.get("projection_layer_norm_eps") or 1e-5),
    )
    own.finish()
    return found
