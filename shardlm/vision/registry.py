"""The families that see, by the `model_type` of config.json."""

import contextlib
import dataclasses
import importlib
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import OF_IMAGES
from shardlm.models.text_parts import OMNI, thinker
from shardlm.vision import glm_videos, qwen_videos
from shardlm.vision.sight import Sight
from shardlm.vision.video import video_of_frames

TEXT_ALONE = 'limit_mm_per_prompt={"image": 0} serves its text without'

FAMILIES = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), "cohere2"),
    **dict.fromkeys(("deepseek_vl", "janus"), "janus"),
    "exaone4_5": "qwen",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_unified": "gemma4_unified",
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glm5_next"), "glm"),
    "idefics3": "smolvlm",
    "internvl": "internvl",
    "kimi_k25": "kimi",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "pixtral",
    "llama4": "llama4",
    "llava": "llava",
    **dict.fromkeys(("llava_next", "llava_onevision"), "llava_next"),
    "minimax_m3_vl": "minimax",
    "mistral3": "pixtral",
    "ovis2": "ovis2",
    "paddleocr_vl": "paddle",
    "paligemma": "paligemma",
    "mistral_large4": "pixtral",
    "smolvlm": "smolvlm",
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), "qwen"),
    **dict.fromkeys((name for of in OMNI.items() for name in of), "qwen"),
    "qwen4_exp": "qwen",
}
# How large images become, of families that read them in any size.
SIZES = {"qwen": ("min_pixels", "max_pixels", "size"), "glm": ("size",), "pixtral": ("size",)}
SIZES |= {"minimax": SIZES["qwen"], "paddle": SIZES["qwen"]}
OF_VIDEOS = {
    "qwen": qwen_videos.ASKS,
    "glm": glm_videos.ASKS,
}  # and of those that read videos, how these are sampled too
_TRIED = (48, 64)  # pixels of an image


def sees(options: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a checkpoint that sees, by an encoder of a family here."""
    options = thinker(options)
    return options.get("model_type") in FAMILIES and isinstance(options.get("vision_config"), Mapping)


def takes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The names by which images of a checkpoint that sees may be prepared otherwise."""
    return SIZES.get(FAMILIES[thinker(options)["model_type"]], ())


def sight_of(
    folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any] = types.MappingProxyType({})
) -> Sight | None:
    """How a checkpoint sees: from its config.json (`options`) and what its folder says of images and tokens. None: it
    is a text model, or what sees in it is of no family here, so that its text is served alone. `asked`: how images are
    to be prepared otherwise than the folder says, by the names of its preprocessor_config.json (SIZES).

    Raises ShardlmError for options that its family does not have, and for values that mean nothing there.
    """
    if not sees(options):
        return None
    options = thinker(options)
    family, known = FAMILIES[options["model_type"]], takes(options)
    every = tuple(dict.fromkeys((*known, *OF_VIDEOS.get(family, ()))))
    if unknown := [name for name in asked if name not in every]:
        said = f"takes {', '.join(every)}" if every else "has images of one size"
        raise ShardlmError(f"mm_processor_kwargs has {unknown[0]!r}, and {options['model_type']} {said}; leave it out")
    try:
        found = importlib.import_module(f"shardlm.vision.{family}").sight(folder, options, asked)
        if found is None:
            return None
        _try(found)
        found = dataclasses.replace(found, asks=known)
        found.asked(dict.fromkeys(asked))  # of a model that reads no videos, or samples them by itself
        return found
    except ShardlmError as error:
        raise ShardlmError(f"{error}. {TEXT_ALONE}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ShardlmError(
            f"{folder}: the vision_config of config.json, {' or '.join(OF_IMAGES)} has a value that nothing can be "
            f"made of ({type(error).__name__}: {error}); download them again. {TEXT_ALONE}"
        ) from error


def _try(sight: Sight) -> None:
    """Prepares an image, so that values that nothing can be made of show before there is any. Raises ValueError for
    what no encoder reads, and whatever is raised."""
    picture = sight.prepare(np.zeros((*_TRIED, 3), np.uint8))
    places, most = sum(token in (sight.vector, *sight.also) for token in sight.tokens(picture)), sight.sizes[-1]
    if places != picture.vectors or not 0 < picture.patches <= most:
        raise ValueError(
            f"an image of {_TRIED[1]} x {_TRIED[0]} has {places} tokens for {picture.vectors} vectors, and "
            f"{picture.patches} patches of at most {most}"
        )
    if not all(np.isfinite(a).all() for a in picture.inputs.values()):
        raise ValueError("numbers that are not finite")
    if sight.videos:
        _try_video(sight)


def _try_video(sight: Sight) -> None:
    """The same with a video; what is refused by name is told who sends one."""
    with contextlib.suppress(ShardlmError):
        clip = sight.videos.prepare(video_of_frames(np.zeros((4, *_TRIED, 3), np.uint8), {"fps": 24})).clip(
            lambda _: ()
        )
        if not all(np.isfinite(a).all() for one in clip.pictures for a in one.inputs.values()):
            raise ValueError("numbers of a video that are not finite")
