"""LLaVA's form of a checkpoint: an encoder of another family, and two products into the text's width."""

import pathlib
from collections.abc import Mapping
from typing import Any

from shardlm.vision import clip, pixtral
from shardlm.vision.sight import Sight


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight | None:
    """Of `model_type` llava with CLIP's encoder (LLaVA 1.5) or Pixtral's (Pixtral 12B). None: with another, or with the
    class token's vector."""
    kind = options["vision_config"].get("model_type", "clip_vision_model")
    strategy = options.get("vision_feature_select_strategy") or "default"
    if kind == "clip_vision_model" and strategy == "default":
        return clip.sight(folder, options, asked)
    return pixtral.sight(folder, options, asked) if kind == "pixtral" and strategy == "full" else None
