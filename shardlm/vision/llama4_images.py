"""Images as Llama 4's encoder reads them: on a canvas of whole tiles that fits their aspect ratio, black to the right
and below, cut into tiles, and once more whole in one. No jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardlm.vision.images import BILINEAR, Pixels, edges, known_by
from shardlm.vision.picture import Picture
from shardlm.vision.tiles import TiledPicture, cut, tile_inputs


@dataclasses.dataclass(frozen=True)
class Llama4Images:
    """side: pixels of a tile's; most: tiles of an image, beside the one that shows all of it; patch: pixels of a
    patch's side; merge: patches a side that one vector is made of; largest: whether an image is made as large as its
    canvas, where it is smaller."""

    side: int
    most: int
    patch: int
    merge: int
    largest: bool
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], side: int, patch: int, merge: int) -> "Llama4Images":
        """By what a folder says of it."""
        own = edges(told, {"height": side, "width": side})
        pixels = Pixels.told(told, resample=BILINEAR)
        return cls(
            own["height"], told.get("max_patches") or 16, patch, merge, bool(told.get("resize_to_max_canvas")), pixels
        )

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: those that leave most of an image's size, the fewest of as good ones."""
        choices = canvases(self.most)
        size = np.array([self.side, self.side]) * choices
        scales = np.min(size.astype(np.float32) / np.float32([height, width]), axis=1)
        above = scales[scales >= 1]
        best = scales.max() if not len(above) else above.max() if self.largest else above.min()
        return min((pair for pair, scale in zip(choices, scales, strict=True) if scale == best), key=math.prod)

    def inside(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """Height and width in pixels on a canvas of so many."""
        if not self.largest:
            canvas = tuple(min(max(own, self.side), most) for own, most in zip((height, width), canvas, strict=True))
        by_height, by_width = canvas[0] / height, canvas[1] / width
        if by_width < by_height:
            found = min(math.floor(height * by_width), canvas[0]), canvas[1]
        else:
            found = canvas[0], min(math.floor(width * by_height), canvas[1])
        return max(1, found[0]), max(1, found[1])

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> TiledPicture: "pixels" float32 [P, patch, patch, 3]."""
        tiles = self.canvas(*pixels.shape[:2])
        canvas = tiles[0] * self.side, tiles[1] * self.side
        height, width = self.inside(*pixels.shape[:2], canvas)
        filled = np.zeros((*canvas, 3), np.uint8)
        filled[:height, :width] = self.pixels.resized(pixels, height, width)
        every = [*cut(filled, self.side)]
        if len(every) > 1:
            every.append(self.pixels.resized(pixels, self.side, self.side))
        inputs = tile_inputs(map(self.numbers, every), self.patch, self.merge)
        grid = len(every), (self.side // self.patch // self.merge) ** 2
        return TiledPicture(inputs, grid, known_by(pixels, self), tiles)

    def numbers(self, pixels: np.ndarray) -> np.ndarray:
        """uint8 -> float32 of the same shape, rounded to bfloat16 at each step, as the model was trained."""
        own = ml_dtypes.bfloat16
        mean, std = (np.asarray(a, np.float32).astype(own) for a in (self.pixels.mean, self.pixels.std))
        scaled = (np.arange(256, dtype=np.float32)[:, None] * np.float32(self.pixels.factor)).astype(own)
        every = ((scaled - mean) / std).astype(np.float32)
        return np.stack([every[:, colour][pixels[..., colour]] for colour in range(3)], axis=-1)


def canvases(most: int) -> list[tuple[int, int]]:
    """Rows and columns of up to so many tiles, those of a ratio together, in transformers' order."""
    ratios: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                ratios.setdefault(rows * rows / count, []).append((rows, count // rows))
    return [pair for pairs in ratios.values() for pair in pairs]
