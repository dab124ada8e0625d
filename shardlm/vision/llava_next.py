"""LLaVA-NeXT and LLaVA-OneVision: LLaVA's encoders on tiles, whose vectors are put together again (anyres_images.py).
Of several images in a prompt each is cut by itself."""

import pathlib
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.vision import llava
from shardlm.vision.anyres_images import AnyresImages
from shardlm.vision.images import processing
from shardlm.vision.sight import Sight

OF_SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14}
OF_SIGLIP |= {"image_size": 384, "num_hidden_layers": 26, "num_attention_heads": 16}
# What a vision_config leaves to the defaults of its own family.
USUAL = {("llava_next", llava.CLIP): llava.OF_CLIP, ("llava_onevision", llava.SIGLIP): OF_SIGLIP}
NEXT = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
ONEVISION = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
AT_MOST = "anyres_max_"  # before the number of tiles


def sight(folder: pathlib.Path, options: Mapping[str, Any], asked: Mapping[str, Any]) -> Sight:
    """Of `model_type` llava_next (Granite Vision's several layers too) and llava_onevision."""
    one = options["model_type"] == "llava_onevision"
    kind = options["vision_config"].get("model_type", llava.SIGLIP if one else llava.CLIP)
    usual = {"model_type": kind, **USUAL.get((options["model_type"], kind), {"image_size": 224})}
    config = llava.config_of(options, usual, -1 if one else -2, taps=4 if one else 1)
    eyes, most = config.eyes, 0
    if one:
        told = options.get("vision_aspect_ratio") or f"{AT_MOST}9"
        if not told.startswith(AT_MOST) or not told[len(AT_MOST) :].isdigit() or not int(told[len(AT_MOST) :]):
            raise ShardlmError(f"config.json has vision_aspect_ratio={told!r}; supported: {AT_MOST}9 and other numbers")
        most = int(told[len(AT_MOST) :])
    canvases = options.get("image_grid_pinpoints") or (ONEVISION if one else NEXT)
    side = options["vision_config"].get("image_size") or usual["image_size"]
    images = AnyresImages.told(processing(folder, asked), side, eyes.patch, canvases, most)
    token = llava.token_of(options, 151_646 if one else 32_000)

    def tokens(picture) -> list[int]:
        return [token] * picture.vectors

    return Sight(token, token, images, tokens, images.sizes(), config, fewer=True)
