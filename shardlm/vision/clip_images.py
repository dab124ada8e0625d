"""Images as CLIP's encoder reads them: their shorter side of so many pixels, and of that the square in the middle. No
jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels, check_grown, known_by, patches
from shardlm.vision.picture import Picture


@dataclasses.dataclass(frozen=True)
class ClipImages:
    """side: pixels of the square's; shorter: of the image's shorter side before; patch: of a patch's; squared: whether
    an image is made a square first, by the mean colour on both sides."""

    side: int
    shorter: int
    patch: int
    squared: bool
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], side: int, patch: int) -> "ClipImages":
        """By what a folder says of it, for an encoder of `side` pixels. Raises ShardlmError where that is another."""
        size, crop = told.get("size") or {"shortest_edge": side}, told.get("crop_size") or {"height": side}
        shorter = size if isinstance(size, int) else size.get("shortest_edge")
        crop = crop if isinstance(crop, int) else crop["height"]
        if crop != side or not shorter or shorter < side or told.get("do_center_crop") is False:
            raise ShardlmError(
                f"the folder prepares images with size={size}, crop_size={crop}, do_center_crop="
                f"{told.get('do_center_crop', True)}; supported: a shortest_edge of at least {side}, and then the "
                f"{side} x {side} pixels in the middle, which its encoder reads"
            )
        pixels = Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD)
        return cls(side, shorter, patch, bool(told.get("do_pad")), pixels)

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3]."""
        whole = self._squared(pixels) if self.squared else pixels
        height, width = whole.shape[:2]
        short = min(height, width)
        size = [int(self.shorter * each / short) for each in (height, width)]
        resized = self.pixels.resized(whole, *size)
        top, left = ((each - self.side) // 2 for each in size)
        middle = resized[top : top + self.side, left : left + self.side]
        inputs = {"pixels": patches(self.pixels.numbers(middle), self.patch)}
        return Picture(inputs, (self.side // self.patch,) * 2, known_by(pixels, self))

    def _squared(self, pixels: np.ndarray) -> np.ndarray:
        """With the mean colour above and below, or beside."""
        height, width = pixels.shape[:2]
        longest = max(height, width)
        check_grown(pixels, longest, longest)
        found = np.empty((longest, longest, 3), np.uint8)
        found[:] = [int(mean * 255) for mean in self.pixels.mean]
        top, left = (longest - height) // 2, (longest - width) // 2
        found[top : top + height, left : left + width] = pixels
        return found
