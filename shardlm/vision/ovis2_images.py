"""Images as Ovis 2 reads them: cut into tiles of one size, as few as show nine tenths of it as large as it is, and
before them once more whole in one. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.vision.images import known_by
from shardlm.vision.internvl_images import InternvlImages
from shardlm.vision.picture import Picture
from shardlm.vision.tiles import TiledPicture, cut, tile_inputs

ENOUGH = 0.9  # of an image's pixels
AROUND = ("start", "grid", "column", "row", "end")  # rows of the table that stand beside vectors, in their order


@dataclasses.dataclass(frozen=True)
class Ovis2Images(InternvlImages):
    """As those; covering: whether tiles are as few as show enough, and not of the nearest aspect ratio."""

    covering: bool = True

    @classmethod
    def told(cls, told: Mapping[str, Any], side: int, patch: int, merge: int) -> "Ovis2Images":
        """By what a folder says of it; in one tile where it does not say `crop_to_patches`. Raises as those."""
        found = super().told(told if told.get("crop_to_patches") else told | {"max_patches": 1}, side, patch, merge)
        return dataclasses.replace(found, covering=told.get("use_covering_area_grid") is not False)

    def tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles. Which grids show how much is found with rows for columns, as in transformers."""
        if not self.covering:
            return super().tiles(height, width)
        counts = range(1, self.most + 1)
        every = sorted(
            ((a, b) for a in counts for b in counts if a * b <= self.most), key=lambda grid: grid[0] * grid[1]
        )
        shown = {grid: _shown(height, width, grid, self.side) for grid in every}
        if enough := [grid for grid in every if shown[grid] > ENOUGH]:
            columns, rows = min(enough, key=lambda grid: (grid[0] * grid[1], -shown[grid]))
        else:
            columns, rows = min(every, key=lambda grid: (-shown[grid], grid[0] * grid[1]))
        return rows, columns

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> TiledPicture: "pixels" float32 [P, patch, patch, 3], and of each of the image's vectors
        "near" int32 [P]: one of AROUND, or behind those that of a patch's square, counted on through all tiles."""
        rows, columns = tiles = self.tiles(*pixels.shape[:2])
        every = [*cut(self.pixels.resized(pixels, rows * self.side, columns * self.side), self.side)]
        if len(every) > 1:
            every.insert(0, self.pixels.resized(pixels, self.side, self.side))
        each = (self.side // self.patch // self.merge) ** 2
        near = np.array(_order(rows, columns, each), np.int32)
        inputs = tile_inputs(map(self.pixels.numbers, every), self.patch, self.merge) | {"near": near}
        most = max(map(len, inputs.values()))
        padded = {n: np.pad(a, [(0, most - len(a)), *[(0, 0)] * (a.ndim - 1)]) for n, a in inputs.items()}
        return TiledPicture(padded, (1, len(near)), known_by(pixels, self), tiles)


def _order(rows: int, columns: int, each: int) -> list[int]:
    start, grid, column, row, end = range(len(AROUND))
    numbers = iter(range(len(AROUND), len(AROUND) + (rows * columns + 1) * each))
    found = [start, *(next(numbers) for _ in range(each)), grid]
    for tile in range(rows * columns if rows * columns > 1 else 0):
        found += [next(numbers) for _ in range(each)]
        if (tile + 1) % columns:
            found.append(column)
        elif tile + 1 < rows * columns:
            found.append(row)
    return [*found, end]


def _shown(height: int, width: int, grid: tuple[int, int], side: int) -> float:
    """The share of an image that a grid of (rows, columns) shows as large as it is."""
    tall, wide = height // grid[0], width // grid[1]
    talls = [tall] * (grid[0] - 1) + [height - tall * (grid[0] - 1)]
    wides = [wide] * (grid[1] - 1) + [width - wide * (grid[1] - 1)]
    found = 0.0
    for own in talls:
        for other in wides:
            longer, shorter = max(own, other), min(own, other)
            found += shorter / longer * side * side if longer > side else longer * shorter
    return found / (height * width)
