"""Images as Gemma 4's encoder reads them: as large as a number of patches allows, in whole squares of those that are
averaged, of any aspect ratio. No jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import Pixels, known_by, patches, places
from shardlm.vision.picture import Picture


@dataclasses.dataclass(frozen=True)
class Gemma4Images:
    """most: patches of an image; patch: pixels of a patch's side; merge: patches of a square's side; whole: whether
    squares are read as they are, and not in patches."""

    most: int
    patch: int
    merge: int
    pixels: Pixels
    whole: bool = False

    @classmethod
    def told(cls, told: Mapping[str, Any], patch: int, merge: int, whole: bool = False) -> "Gemma4Images":
        """By what a folder says of it. Pixels are from -1 to 1, which the model's own code makes of them, those of
        whole squares from 0."""
        for name, here in (("patch_size", patch), ("pooling_kernel_size", merge)):
            if told.get(name, here) != here:
                raise ShardlmError(f"the folder prepares images with {name}={told[name]}, and its model has {here}")
        usual = Pixels()
        resample = told.get("resample")
        pixels = Pixels(
            mean=(0.0,) * 3 if whole else usual.mean,
            std=(1.0,) * 3 if whole else usual.std,
            factor=told.get("rescale_factor") or usual.factor,
            resample=usual.resample if resample is None else resample,
        )
        return cls((told.get("max_soft_tokens") or 280) * merge**2, patch, merge, pixels, whole)

    @property
    def squares(self) -> int:
        """Of an image, at most."""
        return self.most // self.merge**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares."""
        side = self.patch * self.merge
        factor = math.sqrt(self.most * self.patch**2 / (height * width))
        rows, columns = (math.floor(factor * each / side) for each in (height, width))
        longest = self.squares
        if not rows and not columns:
            raise ShardlmError(f"an image of {width} x {height} pixels is smaller than a square of patches; enlarge it")
        if not rows:
            return 1, min(width // height, longest)
        return (rows, columns) if columns else (min(height // width, longest), 1)

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3], "rows" and "columns" int32 [P]; of whole
        squares one for each."""
        grid = self.grid(*pixels.shape[:2])
        side = self.patch * self.merge
        resized = self.pixels.numbers(self.pixels.resized(pixels, grid[0] * side, grid[1] * side))
        size, merge = (side, 1) if self.whole else (self.patch, self.merge)
        rows, columns = places(grid[0] * merge, grid[1] * merge, merge)
        inputs = {"pixels": patches(resized, size, merge), "rows": rows, "columns": columns}
        return Picture(inputs, grid, known_by(pixels, self))
