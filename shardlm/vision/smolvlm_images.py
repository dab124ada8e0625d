"""Images as the encoders of Idefics 3 and SmolVLM read them: their longest side made a given length, then resized to
whole tiles, cut into those, and once more whole in one. No jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.vision.images import LANCZOS, Pixels, known_by
from shardlm.vision.picture import Picture
from shardlm.vision.tiles import TiledPicture, cut, tile_inputs

LARGEST = 4096  # pixels of a side


@dataclasses.dataclass(frozen=True)
class SmolvlmImages:
    """side: pixels of a tile's, of which the encoder reads whole patches; longest: of an image's longest side; split:
    whether images are cut; patch: pixels of a patch's side; merge: patches a side that one vector is made of."""

    side: int
    longest: int
    split: bool
    patch: int
    merge: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], patch: int, merge: int) -> "SmolvlmImages":
        """By what a folder says of it."""
        side = (told.get("max_image_size") or {}).get("longest_edge") or 364
        longest = (told.get("size") or {}).get("longest_edge") or 4 * side
        split = told.get("do_image_splitting")
        pixels = Pixels.told(told, resample=LANCZOS)
        return cls(side, longest, True if split is None else bool(split), patch, merge, pixels)

    @property
    def across(self) -> int:
        """Patches of a tile's side."""
        return self.side // self.patch

    @property
    def most(self) -> int:
        """Tiles of an image at most, beside the one that shows all of it."""
        return math.ceil(min(self.longest, LARGEST) / self.side) ** 2 if self.split else 1

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels with the longest side as long as it is made."""
        ratio = width / height
        if width >= height:
            height, width = int(self.longest / ratio), self.longest
            height += height % 2
        else:
            height, width = self.longest, int(self.longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > LARGEST:
            height, width = int(LARGEST / ratio), LARGEST
        elif height > width and height > LARGEST:
            height, width = LARGEST, int(LARGEST * ratio)
        return max(height, 1), max(width, 1)

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles."""
        ratio, side = width / height, self.side
        if width >= height:
            columns = math.ceil(width / side)
            return math.ceil(int(columns * side / ratio) / side), columns
        rows = math.ceil(height / side)
        return rows, math.ceil(int(rows * side * ratio) / side)

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> TiledPicture: "pixels" float32 [P, patch, patch, 3]."""
        resized = self.pixels.resized(pixels, *self.resized(*pixels.shape[:2]))
        tiles = self.tiles(*resized.shape[:2]) if self.split else (1, 1)
        resized = self.pixels.resized(resized, tiles[0] * self.side, tiles[1] * self.side)
        every = [*cut(resized, self.side)]
        if len(every) > 1:
            every.append(self.pixels.resized(resized, self.side, self.side))
        read = self.across * self.patch
        numbers = (self.pixels.numbers(tile)[:read, :read] for tile in every)
        grid = len(every), (self.across // self.merge) ** 2
        return TiledPicture(tile_inputs(numbers, self.patch, self.merge), grid, known_by(pixels, self), tiles)


def learned(across: int, positions: int) -> np.ndarray:
    """Of each row, or column, of a tile that has so many, which of so many learned positions is its: by its share of
    the side, in float32 with transformers' rounding."""
    steps = np.arange(1 / positions, 1.0, 1 / positions).astype(np.float32)
    share = np.arange(across, dtype=np.float32) * (np.float32(1) / np.float32(across))
    return np.searchsorted(steps, np.minimum(share, np.float32(1 - 1e-6)), side="right")
