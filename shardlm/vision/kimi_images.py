"""Images as Kimi's encoder reads them: as large as they are up to a number of patches, with black below and to the
right up to a whole square of merged patches. No jax."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.vision.images import Pixels, known_by, patches, places
from shardlm.vision.picture import Picture

SHARP = -0.75  # of bicubic interpolation


@dataclasses.dataclass(frozen=True)
class KimiImages:
    """most: patches of an image, longest: of a side; patch: pixels of a patch's side; merge: patches of a square's
    side; rows, columns: of the positions that are learned."""

    most: int
    longest: int
    patch: int
    merge: int
    rows: int
    columns: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], patch: int, merge: int, learned: tuple[int, int]) -> "KimiImages":
        """By what a folder says of it, as transformers or as Moonshot's own files do (media_proc_cfg)."""
        own = told.get("media_proc_cfg") or told
        size = told.get("size") or {}
        most = own.get("in_patch_limit") or own.get("max_patches") or 16_384
        longest = own.get("patch_limit_on_one_side") or size.get("max_height") or 512
        return cls(most, longest, patch, merge, *learned, Pixels.told(own))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels, before what is added to them."""
        count = max(1, height // self.patch) * max(1, width // self.patch)
        longest = self.longest * self.patch
        scale = min(1.0, math.sqrt(self.most / count), longest / height, longest / width)
        return tuple(min(max(1, int(each * scale)), longest) for each in (height, width))

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3], "rows" and "columns" int32 [P], and of the
        learned positions that a patch's is made of "near" int32 [P, 16] and "shares" float32 [P, 16]."""
        height, width = self.resized(*pixels.shape[:2])
        side = self.patch * self.merge
        grid = -(-height // side), -(-width // side)
        filled = np.zeros((grid[0] * side, grid[1] * side, 3), np.uint8)
        filled[:height, :width] = self.pixels.resized(pixels, height, width)
        size = grid[0] * self.merge, grid[1] * self.merge
        rows, columns = places(*size, self.merge)
        inputs = {"pixels": patches(self.pixels.numbers(filled), self.patch, self.merge)}
        inputs |= {"rows": rows, "columns": columns} | bicubic((rows, columns), size, (self.rows, self.columns))
        return Picture(inputs, grid, known_by(pixels, self))


def bicubic(
    place: tuple[np.ndarray, np.ndarray], size: tuple[int, int], learned: tuple[int, int]
) -> dict[str, np.ndarray]:
    """What each place in a grid of `size` has of learned positions [rows * columns]: "near", and "shares" of those."""
    (row_near, row_share), (near, share) = (_taps(*each) for each in zip(place, size, learned, strict=True))
    found = row_near[:, :, None] * learned[1] + near[:, None]
    shares = row_share[:, :, None] * share[:, None]
    return {
        "near": found.reshape(-1, 16).astype(np.int32),
        "shares": shares.reshape(-1, 16).astype(np.float32),
    }


def _taps(place: np.ndarray, size: int, learned: int) -> tuple[np.ndarray, np.ndarray]:
    """(int [P, 4], float [P, 4]) along one axis, centres to centres (Keys, 1981); at an end its last counts again."""
    at = (place + 0.5) * learned / size - 0.5
    first, ahead = np.floor(at), np.arange(-1, 3)
    far = np.abs(at[:, None] - first[:, None] - ahead)
    near = ((SHARP + 2) * far - (SHARP + 3)) * far * far + 1
    beyond = ((SHARP * far - 5 * SHARP) * far + 8 * SHARP) * far - 4 * SHARP
    return np.clip(first[:, None] + ahead, 0, learned - 1), np.where(far <= 1, near, beyond)
