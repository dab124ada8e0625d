"""Images that are cut into tiles of one size, each of which an encoder reads by itself. No jax."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from shardlm.vision.images import patches
from shardlm.vision.picture import Picture


@dataclasses.dataclass(frozen=True, eq=False)
class TiledPicture(Picture):
    """A picture whose vectors stand tile by tile: `grid` is (tiles, vectors of one), `tiles` the (rows, columns) of
    those that the image was cut into; one more shows all of it where they are several."""

    tiles: tuple[int, int] = (1, 1)


def cut(pixels: np.ndarray, side: int) -> Iterable[np.ndarray]:
    """The tiles of an image, row by row: each [side, side, 3]."""
    height, width = pixels.shape[:2]
    for top in range(0, height, side):
        for left in range(0, width, side):
            yield pixels[top : top + side, left : left + side]


def tile_inputs(tiles: Iterable[np.ndarray], patch: int, merge: int) -> dict[str, np.ndarray]:
    """ "pixels" [P, patch, patch, 3] of numbers, tile after tile, in the order of images.patches."""
    return {"pixels": np.concatenate([patches(tile, patch, merge) for tile in tiles])}


def tile_sizes(most: int, of_one: int) -> tuple[int, ...]:
    """Patches that programs have for images of at most so many tiles and one more that shows all: of 1, 3, 5, 9, ..."""
    counts = [1, *(2**power + 1 for power in range(1, most.bit_length()) if 2**power < most), most + 1]
    return tuple(count * of_one for count in dict.fromkeys(counts) if count == 1 or most > 1)
