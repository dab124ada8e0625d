"""Images as the encoders of GLM's models read them: as those of Qwen's, but for bounds that count every frame, sides
that are made a square of patches first, and learned positions by four rows and columns. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.vision.kimi_images import bicubic
from shardlm.vision.qwen_images import QwenImages, resized_to

FEWEST, MOST = 112 * 112, 28 * 28 * 15_000  # pixels of all frames, where a folder does not say


@dataclasses.dataclass(frozen=True)
class GlmImages(QwenImages):
    """`fewest` and `most` of one frame."""

    @classmethod
    def of_frames(cls, told: Mapping[str, Any], patch: int, merge: int, frames: int, side: int) -> "GlmImages":
        """By what a folder says of preparing them (images.processing). Raises as QwenImages.told."""
        size = told.get("size") or {}
        bounds = {"shortest_edge": FEWEST, "longest_edge": MOST} | {name: n for name, n in size.items() if n}
        own = {name: value for name, value in told.items() if name not in ("min_pixels", "max_pixels")}
        own["size"] = {name: bounds[name] / frames for name in ("shortest_edge", "longest_edge")}
        return cls.told(own, patch, merge, frames, 0, side)

    def size(self, height: int, width: int) -> tuple[int, int]:
        least = self.patch * self.merge
        if height < least or width < least:
            scale = max(least / height, least / width)
            height, width = int(height * scale), int(width * scale)
        return resized_to(height, width, least, self.fewest, self.most)

    def shares(self, at: tuple[np.ndarray, np.ndarray], grid: tuple[int, int]) -> dict[str, np.ndarray]:
        return bicubic(at, grid, (self.side, self.side))
