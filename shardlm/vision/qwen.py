"""The encoders of Qwen's models that see: those of Qwen2-VL (https://arxiv.org/abs/2409.12191, section 2.1), Qwen2.5-VL
(windows; https://arxiv.org/abs/2502.13923, section 2.1.1), Qwen3-VL (learned positions, DeepStack;
https://arxiv.org/abs/2511.21631), and of Qwen 3.5 and Qwen4-Exp, which have Qwen3-VL's; and that of EXAONE 4.5, which
is Qwen2.5-VL's with fewer heads of keys and values. Qwen2.5-Omni and Qwen3-Omni have Qwen2.5-VL's and Qwen3-VL's."""

import dataclasses
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import NormConfig
from shardlm.layers.param import Params
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names
from shardlm.vision.images import Pixels, processing, program_sizes, video_processing
from shardlm.vision.options import activation_of, vision_options
from shardlm.vision.qwen_images import QwenImages
from shardlm.vision.qwen_names import OMNI, OMNI_3, qwen_names
from shardlm.vision.qwen_tower import QwenEncoder, frequencies_of
from shardlm.vision.qwen_videos import ASKS, QwenVideos
from shardlm.vision.sight import Sight, Videos
from shardlm.vision.tower import TowerConfig
from shardlm.vision.tower_weights import Tensors

log = logging.getLogger(__name__)

LAYER, RMS = NormConfig("layer", 1e-6), NormConfig("rms", 1e-6)
IMAGE = 151_655  # the token, where a config.json does not say
VIDEO = 151_656
ENDS = {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653}  # around a picture of a video
OF_3_5 = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
UNFILMED = ("qwen4_exp", OMNI, OMNI_3)


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """tower: its layers, on patches of `patch` pixels a side of so many `frames`, which an image repeats; pixels: how
    bytes become numbers; theta of the rotation; merge: patches a side that one vector is made of; width of vectors.
    window: squares of a window's side, in which all layers attend but those of `everywhere`; 0: there are none. side:
    learned positions of a side; 0: there are none. deep: layers whose results are merged too.
    seconds: positions that a second of a video has, 0: each picture of it has one."""

    kind: str
    tower: TowerConfig
    pixels: Pixels
    patch: int
    frames: int
    theta: float
    merge: int
    width: int
    window: int = 0
    everywhere: tuple[int, ...] = ()
    side: int = 0
    deep: tuple[int, ...] = ()
    seconds: float = 0.0

    tensors = Tensors(("visual.",), renames=((r"^(model|thinker)\.", ""),))

    @property
    def inputs(self) -> Mapping[str, tuple[tuple[int, ...], Any]]:
        found = {"pixels": ((self.frames, self.patch, self.patch, 3), np.uint8)}
        found |= {"rows": ((), np.int32), "columns": ((), np.int32)}
        if self.window:
            found |= {"windows": ((), np.int32), "source": ((), np.int32)}
        if self.side:
            found |= {"near": ((4,), np.int32), "shares": ((4,), np.float32)}
        return found

    @property
    def frequencies(self) -> np.ndarray:
        """Of the rotation (frequencies_of)."""
        return frequencies_of(self.theta, self.tower.each)

    def module(self, params: Params) -> nnx.Module:
        return QwenEncoder(self, params)

    def names(self) -> Names:
        return qwen_names(self)


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of any of the `model_type`s. Raises ShardlmError for options of its tower that there are not."""
    told = processing(folder, asked)
    own = vision_options(options["vision_config"], options["model_type"])
    make = {"qwen2_vl": _of_2, **dict.fromkeys(("qwen2_5_vl", "exaone4_5", OMNI), _of_2_5)}
    make = make.get(options["model_type"], _of_3)
    config = make(own, options["model_type"])
    own.finish()
    images = QwenImages.told(told, config.patch, config.merge, config.frames, config.window, config.side)
    images = dataclasses.replace(images, repeated=config.frames)
    config = dataclasses.replace(config, pixels=images.pixels)
    usual = 67 if config.kind == "exaone4_5" else IMAGE
    token, merged = options.get("image_token_id") or options.get("image_token_index") or usual, config.merge**2

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    sizes = program_sizes(images.most_patches, merged)
    axes = config.kind != "exaone4_5"
    videos = _videos(folder, options, config, images, asked)
    return Sight(token, token, images, tokens, sizes, config, merged, len(config.deep), axes, videos=videos)


def _videos(
    folder: pathlib.Path, options: Mapping[str, Any], config: QwenConfig, images: QwenImages, asked: Mapping[str, Any]
) -> Videos | None:
    """None where they cannot be read as the folder says, which is logged, and in families whose videos were not held to
    transformers'."""
    if options["model_type"] in UNFILMED:
        return None
    ends = tuple(options.get(name) or usual for name, usual in ENDS.items()) if config.side else ()
    token = options.get("video_token_id") or (68 if config.kind == "exaone4_5" else VIDEO)
    try:
        prepare = QwenVideos.told(video_processing(folder), images, token, ends, config.seconds)
    except ShardlmError as error:
        log.warning("videos are not read: %s", error)
        return None
    # As transformers 4.57, of Qwen3-VL's release, and vLLM replace it; those of 5.24 leave the two where they are.
    return Videos(token, prepare.asked({name: asked[name] for name in ASKS if name in asked}), ASKS, ends)


def _of_2(own: Options, kind: str) -> QwenConfig:
    width = own("embed_dim", 1280)
    tower = TowerConfig(
        layers=own("depth", 32),
        width=width,
        heads=own("num_heads", 16),
        mlp_dim=int(width * own("mlp_ratio", 4)),
        norm=LAYER,
        activation=activation_of(own("hidden_act", "quick_gelu")),
    )
    return QwenConfig(kind, tower, width=own("hidden_size", 3584), **_common(own, 14))


def _of_2_5(own: Options, kind: str) -> QwenConfig:
    tower = TowerConfig(
        layers=own("depth", 32),
        width=own("hidden_size", 3584),
        heads=own("num_heads", 16),
        mlp_dim=own("intermediate_size", 3420),
        norm=RMS,
        activation=activation_of(own("hidden_act", "silu")),
        gated=True,
        kv_heads=own("num_key_value_heads", 8) if kind == "exaone4_5" else 0,
    )
    if kind == OMNI:
        own.aside("embed_dim", "init_std")  # the first repeats hidden_size
    common = _common(own, 14)
    window = own("window_size", 112) // common["merge"] // common["patch"]
    everywhere = tuple(own("fullatt_block_indexes", (7, 15, 23, 31)))
    common |= {"window": window, "everywhere": everywhere, "seconds": float(own("tokens_per_second", 4))}
    return QwenConfig(kind, tower, width=own("out_hidden_size", 3584), **common)


def _of_3(own: Options, kind: str) -> QwenConfig:
    tower = TowerConfig(
        layers=own("depth", 27),
        width=own("hidden_size", 1152),
        heads=own("num_heads", 16),
        mlp_dim=own("intermediate_size", 4304),
        norm=LAYER,
        activation=activation_of(own("hidden_act", "gelu_pytorch_tanh")),
    )
    deep = () if kind in OF_3_5 else (8, 16, 24)
    if kind in OF_3_5:
        own.only("deepstack_visual_indexes", None, [])
    own.only("apply_vit_abs_pos_embed", True)
    return QwenConfig(
        kind,
        tower,
        width=own("out_hidden_size", 3584),
        side=math.isqrt(own("num_position_embeddings", 2304)),
        deep=tuple(own("deepstack_visual_indexes", deep)),
        **_common(own, 16),
    )


def _common(own: Options, patch: int) -> dict[str, Any]:
    own.aside("tokens_per_second")  # of videos
    for name in ("in_channels", "in_chans"):
        own.only(name, 3)
    found = {"patch": own("patch_size", patch), "frames": own("temporal_patch_size", 2)}
    own.only("spatial_patch_size", found["patch"])
    theta = own("rope_parameters", {}).get("rope_theta", 10_000.0)
    return found | {"merge": own("spatial_merge_size", 2), "theta": float(theta), "pixels": Pixels()}
