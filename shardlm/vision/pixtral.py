"""Pixtral's encoder (https://arxiv.org/abs/2410.07073, section 2.1) with Mistral 3's merger of patches: any aspect
ratio, rotations by rows and columns, rows of tokens with a break after each."""

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
from shardlm.vision.images import processing, program_sizes, token_ids
from shardlm.vision.options import activation_of, layers_used, vision_options
from shardlm.vision.pixtral_images import BREAK, END, PixtralImages
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
    sines_of,
)
from shardlm.vision.tower_weights import Tensors

RMS = NormConfig("rms", 1e-5)
PREFIXES = ("vision_tower.", "multi_modal_projector.")
LIGHTON = (
    (r"^model\.", ""),
    (r"^vision_encoder\.", "vision_tower."),
    (r"^vision_projection\.", "multi_modal_projector."),
)
MISTRALS = (  # names in Mistral's own files, and those of transformers
    (r"^vision_encoder\.", "vision_tower."),
    (r"^pre_mm_projector_norm\.", "multi_modal_projector.norm."),
    (r"^patch_merger\.", "multi_modal_projector.patch_merger."),
    (r"^vision_language_adapter\.w_in\.", "multi_modal_projector.linear_1."),
    (r"^vision_language_adapter\.w_out\.", "multi_modal_projector.linear_2."),
    (r"\.attention\.w([qkvo])\.", r".attention.\1_proj."),
    (r"\.feed_forward\.w1\.", ".feed_forward.gate_proj."),
    (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
    (r"\.feed_forward\.w3\.", ".feed_forward.up_proj."),
)


@dataclasses.dataclass(frozen=True)
class PixtralConfig:
    """tower: its layers, one of `patch` pixels a side; theta of the rotation; merge: patches a side that one vector is
    made of; width of vectors; eps of the merger's norm; activation and biases of what projects; merges: whether there
    is a merger; mistrals: whether files have Mistral's own names, and rotated pairs side by side; lighton: whether they
    have LightOnOCR's."""

    tower: TowerConfig
    patch: int
    theta: float
    merge: int
    width: int
    eps: float
    activation: Activation
    bias: bool
    merges: bool
    mistrals: bool = False
    lighton: bool = False

    @property
    def tensors(self) -> Tensors:
        if self.mistrals or self.lighton:
            return Tensors(PREFIXES, renames=MISTRALS if self.mistrals else LIGHTON)
        return Tensors(PREFIXES)

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        return {
            "pixels": ((self.patch, self.patch, 3), np.float32),
            "rows": ((), np.int32),
            "columns": ((), np.int32),
        }

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a row, and a column, of each rotated pair: half of them turn by row, half by column, [2, H / 2]."""
        every = self.theta ** -(np.arange(0, self.tower.each, 2) / self.tower.each)
        none = np.zeros(len(every) // 2)
        return np.stack([np.concatenate([every[0::2], none]), np.concatenate([none, every[1::2]])])

    def module(self, params: Params) -> nnx.Module:
        return PixtralEncoder(self, params)

    def names(self) -> Names:
        projector = "multi_modal_projector"
        blocks = block_names(
            self.tower,
            "tower.block",
            "vision_tower.transformer.layers.{layer}.",
            attention_norm="attention_norm",
            mlp_norm="ffn_norm",
            **{f"w{letter}": f"attention.{letter}_proj" for letter in "qkvo"},
            **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        )
        for path in ("tower.block.wq", "tower.block.wk") if self.mistrals else ():  # rotated pairs side by side
            blocks[path] = dataclasses.replace(blocks[path], pairs=("H", 0, self.tower.each))
        merged = Tensor(f"{projector}.patch_merger.merging_layer.weight", "F (D M) -> M D F")
        return {
            **patch_names("patches", "vision_tower.patch_conv", bias=False),
            **norm_names(RMS, "first_norm", "vision_tower.ln_pre"),
            **blocks,
            **({**norm_names(RMS, "merger_norm", f"{projector}.norm"), "merger": merged} if self.merges else {}),
            **linear_names("first", f"{projector}.linear_1", self.bias),
            **linear_names("second", f"{projector}.linear_2", self.bias),
        }


class PixtralEncoder(nnx.Module):
    """Patches, tower, merger [M, D, D] of M patches, and two products with an activation between."""

    def __init__(self, config: PixtralConfig, params: Params):
        D, M = config.tower.width, config.merge**2
        self.config = config
        self.patches = Patches(config.patch, 3, D, False, params)
        self.first_norm = Norm(RMS, D, params)
        self.tower = Tower(config.tower, params)
        if config.merges:
            self.merger_norm = Norm(NormConfig("rms", config.eps), D, params)
            self.merger = params((M, D, D), (None, "norm", None), normal((M * D) ** -0.5), into=2)
        self.first = Linear(D, config.width, config.bias, params)
        self.second = Linear(config.width, config.width, config.bias, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        x = self.first_norm(self.patches(inputs["pixels"], execution), execution)
        sines = sines_of((inputs["rows"], inputs["columns"]), self.config.frequencies)
        x, _ = self.tower(x, count, execution, sines)
        if self.config.merges:
            x = self.merger_norm(x, execution).reshape(-1, self.config.merge**2, x.shape[-1])
            x = jnp.einsum("pmd,mdf->pf", x, in_use(self.merger, execution))
        return self.second(activate(self.first(x, execution), self.config.activation), execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight | None:
    """Of `model_type` mistral3 and mistral_large4, of llava, where no patches are merged, and of lighton_ocr, where no
    tokens part rows. None: with another tower than Pixtral's."""
    told = options["vision_config"]
    if told.get("model_type", "pixtral") != "pixtral":
        return None
    config = _config(options)
    processed = processing(folder, asked)
    images = PixtralImages.told(processed, config.patch, config.merge, told.get("image_size") or 1540, config.lighton)
    usual = 151_655 if config.lighton else 10
    token = options.get("image_token_index") or options.get("image_token_id") or usual
    ends = () if config.lighton else token_ids(folder, (BREAK, END))

    def tokens(picture) -> list[int]:
        rows, columns = picture.grid
        every = ([token] * columns + [*ends[:1]]) * rows
        return [*every[:-1], ends[1]] if ends else every

    most = (-(-images.longest // images.side) * images.side // config.patch) ** 2
    return Sight(token, token, images, tokens, program_sizes(most, config.merge**2), config, config.merge**2)


def _config(options: Mapping[str, Any]) -> PixtralConfig:
    own, text = vision_options(options["vision_config"], "pixtral"), text_config(options)
    width, heads = own("hidden_size", 1024), own("num_attention_heads", 16)
    tower = TowerConfig(
        layers=layers_used(own("num_hidden_layers", 24), options.get("vision_feature_layer", -1)),
        width=width,
        heads=heads,
        mlp_dim=own("intermediate_size", 4096),
        norm=RMS,
        activation=activation_of(own("hidden_act", "gelu")),
        gated=True,
        bias=False,
        out_bias=False,
        mlp_bias=False,
    )
    own.only("head_dim", width // heads)
    own.aside("vocab_size")
    merges = options.get("model_type") != "llava"
    rope = {"rope_theta": own("rope_theta", 10_000.0)} | own("rope_parameters", {})
    found = PixtralConfig(
        tower=tower,
        patch=own("patch_size", 16),
        theta=float(rope["rope_theta"]),
        merge=(options.get("spatial_merge_size") or 2) if merges else 1,
        width=text["hidden_size"],
        eps=text.get("rms_norm_eps") or 1e-5,
        activation=activation_of(options.get("projector_hidden_act") or "gelu"),
        bias=bool(options.get("multimodal_projector_bias", not merges)),
        merges=merges,
        mistrals=options.get("model_type") == "mistral_large4",
        lighton=options.get("model_type") == "lighton_ocr",
    )
    own.finish()
    return found
