"""Images as Janus and DeepSeek-VL read them: their longer side of so many pixels, and beside them the mean colour up to
a square. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels, edges, known_by, patches
from shardlm.vision.picture import Picture


@dataclasses.dataclass(frozen=True)
class JanusImages:
    """side: pixels of the square's; patch: of a patch's; least: of an image's shorter side."""

    side: int
    patch: int
    least: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], side: int, patch: int) -> "JanusImages":
        """By what a folder says of it, for an encoder of `side` pixels. Raises ShardlmError where that is another."""
        size = edges(told, {"height": side, "width": side})
        if (size.get("height"), size.get("width")) != (side, side) or told.get("do_pad") is False:
            raise ShardlmError(
                f"the folder prepares images with size={size}, do_pad={told.get('do_pad', True)}, and its encoder "
                f"reads squares of {side} pixels; correct them in its preprocessor_config.json"
            )
        least = told.get("min_size") or 14
        if not 1 <= least <= side:
            raise ShardlmError(f"the folder prepares images with min_size={least}; it must be 1 to {side}")
        return cls(side, patch, least, Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD))

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3] and "positions" int32 [P], row by row."""
        scale = self.side / max(pixels.shape[:2])
        height, width = (max(round(each * scale), self.least) for each in pixels.shape[:2])
        square = np.empty((self.side, self.side, 3), np.uint8)
        square[:] = [int(mean * 255) for mean in self.pixels.mean]
        top, left = (self.side - height) // 2, (self.side - width) // 2
        square[top : top + height, left : left + width] = self.pixels.resized(pixels, height, width)
        cut = patches(self.pixels.numbers(square), self.patch)
        inputs = {"pixels": cut, "positions": np.arange(len(cut), dtype=np.int32)}
        return Picture(inputs, (self.side // self.patch,) * 2, known_by(pixels, self))
