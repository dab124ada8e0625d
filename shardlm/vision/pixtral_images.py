"""Images as Pixtral's encoder reads them: not larger than a longest edge, in whole squares of merged patches, of any
aspect ratio. No jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.asked import check_most, edges_asked, number_asked
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels, edges, known_by, patches, places
from shardlm.vision.picture import Picture

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclasses.dataclass(frozen=True)
class PixtralImages:
    """longest: pixels that no side has more of; patch: pixels of a patch's side; merge: patches of a square's side."""

    longest: int
    patch: int
    merge: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], patch: int, merge: int, image_size: int) -> "PixtralImages":
        """By what a folder says of it; without a word the longest edge is `image_size`."""
        size = edges(told, {"longest_edge": image_size})
        longest = size.get("longest_edge") or min(size["height"], size["width"])
        return cls(longest, patch, merge, Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD))

    def asked(self, how: Mapping[str, Any]) -> "PixtralImages":
        """As a request wants its images, of which none has a longer side than the longest here: size with longest_edge,
        or height and width. Raises ShardlmError."""
        size = edges_asked(how, ("longest_edge", "height", "width"))
        each = [number_asked(f"size {name}", value) for name, value in size.items()]
        longest = size.get("longest_edge") or min(each, default=self.longest)
        check_most("size longest_edge", longest, self.longest)
        return dataclasses.replace(self, longest=longest)

    @property
    def side(self) -> int:
        """Pixels of a square's."""
        return self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares."""
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise ShardlmError(
                f"an image has no pixel left in one direction once its longest side is {self.longest}; crop it"
            )
        return -(-height // self.side), -(-width // self.side)

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3], "rows" and "columns" int32 [P]."""
        height, width, _ = pixels.shape
        grid = self.grid(height, width)
        resized = self.pixels.resized(pixels, grid[0] * self.side, grid[1] * self.side)
        rows, columns = places(grid[0] * self.merge, grid[1] * self.merge, self.merge)
        inputs = {"pixels": patches(self.pixels.numbers(resized), self.patch, self.merge), "rows": rows}
        return Picture(inputs | {"columns": columns}, grid, known_by(pixels, self))
