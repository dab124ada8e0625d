"""The encoders of GLM's models that see: that of GLM-4.1V, 4.5V and 4.6V (https://arxiv.org/abs/2507.01006, section
2.1), whose positions are learned and turned, and that of GLM-OCR and GLM-5 Next, with norms of queries and keys and no
learned positions. Squares of patches are made one by a convolution, and a gated product follows."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, fused
from shardlm.ops.swiglu import Activation, activate, gated
from shardlm.vision.glm_images import GlmImages
from shardlm.vision.glm_videos import ASKS, GlmVideos
from shardlm.vision.images import Pixels, processing, program_sizes, token_ids, video_processing
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.qwen_tower import frequencies_of, half_by_half, of_bytes
from shardlm.vision.sight import Sight, Videos
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
)
from shardlm.vision.tower_weights import Tensors

log = logging.getLogger(__name__)

MERGER = NormConfig("layer", 1e-5)
# The token, where a config.json does not say; those of the later encoder are the last two.
IMAGE = {"glm4v": 151_343, "glm46v": 151_343, "glm4v_moe": 151_363, "glm_ocr": 59_280, "glm5_next": 154_854}
LATER = ("glm_ocr", "glm5_next")
FILMS = ("glm4v", "glm46v", "glm4v_moe")  # that read videos, whose marks are around a picture, and of a video
MARKS = ("<|begin_of_image|>", "<|end_of_image|>", "<|video|>")


@dataclasses.dataclass(frozen=True)
class GlmConfig:
    """tower: its layers, on patches of `patch` pixels a side of so many `frames`, which an image repeats; pixels: how
    bytes become numbers; theta of the rotation; merge: patches a side that one vector is made of; width of vectors;
    inner: of the gated product's; side: learned positions of a side, 0: there are none, nor a norm before them; films:
    whether frames of videos are read too."""

    tower: TowerConfig
    pixels: Pixels
    patch: int
    frames: int
    theta: float
    merge: int
    width: int
    inner: int
    activation: Activation
    side: int = 0
    films: bool = False

    tensors = Tensors(("visual.",), r"^visual\.rotary_pos_emb\.inv_freq$")

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        pixels = (self.patch, self.patch, 3)
        found = {"pixels": ((self.frames, *pixels) if self.films else pixels, np.uint8)}
        found |= {"rows": ((), np.int32), "columns": ((), np.int32)}
        return found | ({"near": ((16,), np.int32), "shares": ((16,), np.float32)} if self.side else {})

    @property
    def frequencies(self) -> np.ndarray:
        """Of the rotation (frequencies_of)."""
        return frequencies_of(self.theta, self.tower.each)

    def module(self, params: Params) -> nnx.Module:
        return GlmEncoder(self, params)

    def names(self) -> Names:
        block, merger = "visual.blocks.{layer}.", "visual.merger"
        blocks = block_names(
            self.tower,
            "tower.block",
            block,
            attention_norm="norm1",
            mlp_norm="norm2",
            **dict.fromkeys(("wq", "wk", "wv"), "attn.qkv"),
            wo="attn.proj",
            **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
            **({name: f"attn.{name}" for name in ("q_norm", "k_norm")} if self.tower.head_norm else {}),
        )
        for letter, end in (("w", "weight"), ("b", "bias")) if self.tower.bias else (("w", "weight"),):
            sizes = {f"tower.block.{letter}{of}": self.tower.width for of in "qkv"}
            blocks |= fused(blocks, f"{block}attn.qkv.{end}", sizes)
        learned = {
            "positions": Tensor("visual.embeddings.position_embedding.weight"),
            **norm_names(self.tower.norm, "first_norm", "visual.post_conv_layernorm"),
        }
        return {
            "patches": Tensor("visual.patch_embed.proj.weight", "D C T Y X -> T Y X C D"),
            "patches_bias": Tensor("visual.patch_embed.proj.bias"),
            **(learned if self.side else {}),
            **blocks,
            **norm_names(self.tower.norm, "last_norm", "visual.post_layernorm"),
            **patch_names("squares", "visual.downsample", bias=True),
            **linear_names("first", f"{merger}.proj", bias=False),
            **norm_names(MERGER, "norm", f"{merger}.post_projection_norm"),
            **{
                k: v
                for part in ("gate", "up", "down")
                for k, v in linear_names(part, f"{merger}.{part}_proj", False).items()
            },
        }


class GlmEncoder(nnx.Module):
    """Weights "patches" (frames, size, size, colours, D), "patches_bias" (D,) and, where learned, "positions" (side *
    side, D); norms, tower, squares, and the products."""

    def __init__(self, config: GlmConfig, params: Params):
        D, patch, width = config.tower.width, config.patch, config.width
        self.config = config
        shape, names = (config.frames, patch, patch, 3, D), (None, None, None, None, "norm")
        self.patches = params(shape, names, normal((config.frames * 3 * patch**2) ** -0.5), into=4)
        self.patches_bias = params((D,), ("norm",), constant(0.0))
        if config.side:
            self.positions = params((config.side**2, D), (None, "norm"), normal(0.02))
            self.first_norm = Norm(config.tower.norm, D, params)
        self.tower = Tower(config.tower, params)
        self.last_norm = Norm(config.tower.norm, D, params)
        self.squares = Patches(config.merge, D, width, True, params)
        self.first = Linear(width, width, False, params)
        self.norm = Norm(MERGER, width, params)
        self.gate, self.up = (Linear(width, config.inner, False, params) for _ in range(2))
        self.down = Linear(config.inner, width, False, params)

    def __call__(self, inputs: Mapping[str, jax.Array], count: jax.Array, execution: Execution) -> jax.Array:
        """Inputs as glm_images.GlmImages makes them; returns [P // merged, width]."""
        config = self.config
        x = of_bytes(inputs["pixels"], config.pixels, in_use(self.patches, execution), execution)
        x = x + in_use(self.patches_bias, execution)
        if config.side:
            table = in_use(self.positions, execution).astype(jnp.float32)
            x = self.first_norm(x, execution) + shared(table, inputs["near"], inputs["shares"]).astype(x.dtype)
        sines = half_by_half(inputs["rows"], inputs["columns"], config.frequencies)
        x, _ = self.tower(x, count, execution, sines)
        x = self.last_norm(x, execution).reshape(-1, config.merge, config.merge, x.shape[-1])
        x = self.first(self.squares(x, execution), execution)
        x = activate(self.norm(x, execution), "gelu")
        own = gated(self.gate(x, execution), self.up(x, execution), config.activation, config.tower.limit)
        return self.down(own, execution)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` glm4v, glm4v_moe, glm46v, glm_ocr and glm5_next, whose text alone has no axes."""
    kind = options["model_type"]
    own = vision_options(options["vision_config"], f"{kind}_vision")
    config = _config(own, kind)
    own.finish()
    images = GlmImages.of_frames(processing(folder, asked), config.patch, config.merge, config.frames, config.side)
    token, merged = options.get("image_token_id") or IMAGE[kind], config.merge**2

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    sizes = program_sizes(images.most_patches, merged)
    filmed = dataclasses.replace(images, repeated=config.frames)
    videos = _videos(folder, options, filmed, token, asked) if kind in FILMS else None
    images = filmed if videos else images
    config = dataclasses.replace(config, pixels=images.pixels, films=videos is not None)
    return Sight(token, token, images, tokens, sizes, config, merged, axes=kind != "glm5_next", videos=videos)


def _videos(
    folder: pathlib.Path, options: Mapping[str, Any], images: GlmImages, token: int, asked: Mapping[str, Any]
) -> Videos | None:
    """None where they cannot be read as the folder says, which is logged."""
    later = options["model_type"] == "glm46v"
    try:
        begin, end, place = token_ids(folder, MARKS)
        prepare = GlmVideos.of_folder(video_processing(folder), images, token, (begin, end), later)
    except ShardlmError as error:
        log.warning("videos are not read: %s", error)
        return None
    asks = ASKS[later:]
    return Videos(place, prepare.asked({name: asked[name] for name in asks if name in asked}), asks)


def _config(own: Options, kind: str) -> GlmConfig:
    later, limit = kind in LATER, 0.0
    own.only("in_channels", 3)
    width, out = own("hidden_size", 1024 if later else 1536), own("out_hidden_size", 1536 if later else 4096)
    inner, bias = own("intermediate_size", 4096 if later else 13_696), bool(own("attention_bias", later))
    activation = activation_of(own("hidden_act", "silu"))
    norm = NormConfig("rms", own("rms_norm_eps", 1e-5))
    if kind == "glm5_next":
        own.only("hidden_act", "silu")
        limit, activation = float(own("swiglu_limit", 10.0)), "silu_of_cut"
    tower = TowerConfig(
        layers=own("depth", 24),
        width=width,
        heads=own("num_heads", 16 if later else 12),
        mlp_dim=inner if later else out,
        norm=norm,
        activation=activation,
        gated=True,
        bias=bias,
        out_bias=bias and later,
        mlp_bias=bias and later,
        head_norm=norm if later else None,
        limit=limit,
    )
    patch = own("patch_size", 14)
    if later:  # that of GLM-OCR by its colours
        inner = 3 * out if kind == "glm_ocr" else own("projection_intermediate_size", 10_240)
    return GlmConfig(
        tower=tower,
        pixels=Pixels(),
        patch=patch,
        frames=own("temporal_patch_size", 2),
        theta=float(own("rope_parameters", {}).get("rope_theta", 10_000.0)),
        merge=own("spatial_merge_size", 2),
        width=out,
        inner=inner,
        activation=activation,
        side=0 if later else (own.values.get("image_size") or 336) // patch,
    )
