"""Images as InternVL's encoder reads them: resized to whole tiles of about their aspect ratio, cut into those, and once
more whole in one. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels, edges, known_by
from shardlm.vision.picture import Picture
from shardlm.vision.read import MAX_PIXELS
from shardlm.vision.tiles import TiledPicture, cut, tile_inputs


@dataclasses.dataclass(frozen=True)
class InternvlImages:
    """side: pixels of a tile's; least, most: tiles of an image, beside the one that shows all of it; patch: pixels of a
    patch's side; merge: patches a side that one vector is made of."""

    side: int
    least: int
    most: int
    patch: int
    merge: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], side: int, patch: int, merge: int) -> "InternvlImages":
        """By what a folder says of it, for an encoder that reads tiles of `side`. Raises ShardlmError where that is
        not what it says, and for more tiles than are prepared."""
        own, least, most = edges(told, {}), told.get("min_patches") or 1, told.get("max_patches") or 12
        if own and own != {"height": side, "width": side}:
            raise ShardlmError(
                f"the folder cuts images into tiles of size={own}, and its encoder reads {side} x {side} pixels; "
                "correct size in its preprocessor_config.json"
            )
        if not 1 <= least <= most or most * side**2 > MAX_PIXELS:
            raise ShardlmError(
                f"the folder cuts images into min_patches={least} to max_patches={most} tiles of {side} pixels; the "
                f"second needs to be the larger, and all at most {MAX_PIXELS} pixels"
            )
        return cls(side, least, most, patch, merge, Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD))

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: those of the ratio that is nearest, and of as near ones the most that the image
        fills by half."""
        counts = range(1, self.most + 1)
        every = [(c, r) for c in counts for r in counts if self.least <= c * r <= self.most]
        best, found = float("inf"), (1, 1)
        for columns, rows in sorted(every, key=lambda pair: pair[0] * pair[1]):
            off = abs(width / height - columns / rows)
            filled = height * width > 0.5 * self.side**2 * columns * rows
            if off < best or (off == best and filled):
                best, found = off, (rows, columns)
        return found

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> TiledPicture: "pixels" float32 [P, patch, patch, 3]."""
        tiles = self.tiles(*pixels.shape[:2])
        every = [*cut(self.pixels.resized(pixels, tiles[0] * self.side, tiles[1] * self.side), self.side)]
        if len(every) > 1:
            every.append(self.pixels.resized(pixels, self.side, self.side))
        inputs = tile_inputs(map(self.pixels.numbers, every), self.patch, self.merge)
        grid = len(every), (self.side // self.patch // self.merge) ** 2
        return TiledPicture(inputs, grid, known_by(pixels, self), tiles)
