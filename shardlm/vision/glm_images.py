"""Images as the encoders of GLM's models read them: as those of Qwen's, but for bounds that count every frame, sides
that are made a square of patches first, and learned positions by four rows and columns. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.asked import check_most, edges_asked, number_asked
from shardlm.vision.kimi_images import bicubic
from shardlm.vision.qwen_images import QwenImages, resized_to

EDGES = ("shortest_edge", "longest_edge")
FEWEST, MOST = 112 * 112, 28 * 28 * 15_000  # pixels of all frames, where a folder does not say


@dataclasses.dataclass(frozen=True)
class GlmImages(QwenImages):
    """`fewest` and `most` of one frame, of which there are `frames`."""

    frames: int = 1

    @classmethod
    def of_frames(cls, told: Mapping[str, Any], patch: int, merge: int, frames: int, side: int) -> "GlmImages":
        """By what a folder says of preparing them (images.processing). Raises as QwenImages.told."""
        size = told.get("size") or {}
        bounds = dict(zip(EDGES, (FEWEST, MOST), strict=True)) | {name: n for name, n in size.items() if n}
        own = {name: value for name, value in told.items() if name not in ("min_pixels", "max_pixels")}
        own["size"] = {name: bounds[name] / frames for name in EDGES}
        return dataclasses.replace(cls.told(own, patch, merge, frames, 0, side), frames=frames)

    def asked(self, how: Mapping[str, Any]) -> "GlmImages":
        """As a request wants its images, by size with shortest_edge and longest_edge, which count every frame. Raises
        as QwenImages.asked."""
        size, own = edges_asked(how, EDGES), zip(EDGES, (self.fewest, self.most), strict=True)
        edges = {name: size.get(name, int(bound * self.frames)) for name, bound in own}
        fewest, most = (number_asked(f"size {name}", edges[name]) for name in EDGES)
        check_most("size longest_edge", most, int(self.most * self.frames))
        if most < (least := max(fewest, self.frames * (self.patch * self.merge) ** 2)):
            raise ShardlmError(
                f"mm_processor_kwargs makes images of size shortest_edge={fewest} to longest_edge={most}; the second "
                f"must be {least} or more"
            )
        return dataclasses.replace(self, fewest=fewest / self.frames, most=most / self.frames)

    def size(self, height: int, width: int) -> tuple[int, int]:
        least = self.patch * self.merge
        if height < least or width < least:
            scale = max(least / height, least / width)
            height, width = int(height * scale), int(width * scale)
        return resized_to(height, width, least, self.fewest, self.most)

    def shares(self, at: tuple[np.ndarray, np.ndarray], grid: tuple[int, int]) -> dict[str, np.ndarray]:
        return bicubic(at, grid, (self.side, self.side))
