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
    """longest: pixels that no side has more of; patch: pixels of a patch's side; merge: patches of a square's side;
    side: pixels that sides are multiples of: a square's, or a patch's, where those are read that are no whole square
    and make no vector."""

    longest: int
    patch: int
    merge: int
    side: int
    pixels: Pixels

    @classmethod
    def told(
        cls, told: Mapping[str, Any], patch: int, merge: int, image_size: int, said: bool = False
    ) -> "PixtralImages":
        """By what a folder says of it; without a word the longest edge is `image_size`. `said`: whether it says too
        what sides are multiples of. Raises ShardlmError where that is neither a patch nor a square."""
        side = told.get("patch_size") or patch * merge if said else patch * merge
        side = side["height"] if isinstance(side, dict) else side
        if side not in (patch, patch * merge):
            raise ShardlmError(
                f"the folder prepares images with patch_size={side}, and its encoder has patches of {patch} and "
                f"squares of {patch * merge} pixels; correct its preprocessor_config.json"
            )
        size = edges(told, {"longest_edge": image_size})
        longest = size.get("longest_edge") or min(size["height"], size["width"])
        return cls(longest, patch, merge, side, Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD))

    def asked(self, how: Mapping[str, Any]) -> "PixtralImages":
        """As a request wants its images, of which none has a longer side than the longest here: size with longest_edge,
        or height and width. Raises ShardlmError."""
        size = edges_asked(how, ("longest_edge", "height", "width"))
        each = [number_asked(f"size {name}", value) for name, value in size.items()]
        longest = size.get("longest_edge") or min(each, default=self.longest)
        check_most("size longest_edge", longest, self.longest)
        return dataclasses.replace(self, longest=longest)

    def sides(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels. Raises ShardlmError where no square is left."""
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not height or not width:
            raise ShardlmError(
                f"an image has no pixel left in one direction once its longest side is {self.longest}; crop it"
            )
        found = -(-height // self.side) * self.side, -(-width // self.side) * self.side
        if min(found) < self.patch * self.merge:
            raise ShardlmError(
                f"an image becomes {found[1]} x {found[0]} pixels, and the model makes vectors of squares of "
                f"{self.patch * self.merge}; crop it, or make it larger"
            )
        return found

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3], "rows" and "columns" int32 [P]."""
        height, width, _ = pixels.shape
        size = self.sides(height, width)
        resized = self.pixels.numbers(self.pixels.resized(pixels, *size))
        grid = size[0] // (self.patch * self.merge), size[1] // (self.patch * self.merge)
        row, column = places(*(side // self.patch for side in size))
        whole = (row < grid[0] * self.merge) & (column < grid[1] * self.merge)
        rows, columns = places(grid[0] * self.merge, grid[1] * self.merge, self.merge)
        rows, columns = np.append(rows, row[~whole]), np.append(columns, column[~whole])
        every = patches(resized, self.patch)[rows * (size[1] // self.patch) + columns]
        inputs = {"pixels": every, "rows": rows, "columns": columns}
        return Picture(inputs, grid, known_by(pixels, self))
