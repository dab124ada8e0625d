"""Images as LFM2-VL's encoder (https://arxiv.org/abs/2511.23404) reads them: of any aspect ratio within bounds on their
patches; larger ones in tiles, and once more whole. No jax.

transformers' image_processing_lfm2_vl.py is the definition, but that images are resized by Pillow.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import BILINEAR, Pixels, known_by, patches, places
from shardlm.vision.picture import Picture
from shardlm.vision.read import MAX_PIXELS
from shardlm.vision.tiles import TiledPicture, cut


@dataclasses.dataclass(frozen=True)
class Lfm2Images:
    """fewest, most: vectors of an image that is not cut, and of one that is whole beside its tiles; tolerance: how many
    times `most` those of an image may be that is not cut; tiles: fewest and most of an image that is; side: pixels of
    a tile's; whole: whether all of it stands behind its tiles; patch: pixels of a patch's side; merge: patches a side
    that one vector is made of; learned: positions of a side."""

    fewest: int
    most: int
    tolerance: float
    tiles: tuple[int, int]
    side: int
    whole: bool
    patch: int
    merge: int
    learned: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], patch: int, merge: int, learned: int) -> "Lfm2Images":
        """By what a folder says of it. Raises ShardlmError where that is not what the encoder was made for."""
        for name, of_encoder in (("encoder_patch_size", patch), ("downsample_factor", merge)):
            if told.get(name, of_encoder) != of_encoder:
                raise ShardlmError(
                    f"the folder prepares images with {name}={told[name]} and its config.json has {of_encoder}; "
                    "download its preprocessor_config.json again"
                )
        split, side = told.get("do_image_splitting"), told.get("tile_size") or 512
        tiles = (told.get("min_tiles") or 2, told.get("max_tiles") or 10) if split is None or split else (1, 1)
        if tiles[0] > tiles[1] or side % (patch * merge) or tiles[1] * side**2 > MAX_PIXELS:
            raise ShardlmError(
                f"the folder cuts images into {tiles[0]} to {tiles[1]} tiles of {side} pixels; the second number needs "
                f"to be the larger, the third a multiple of {patch * merge}, and all at most {MAX_PIXELS} pixels"
            )
        return cls(
            told.get("min_image_tokens") or 64,
            told.get("max_image_tokens") or 256,
            float(told.get("max_pixels_tolerance") or 2.0),
            tiles,
            side,
            told.get("use_thumbnail") is not False,
            patch,
            merge,
            learned,
            Pixels.told(told, resample=BILINEAR),
        )

    @property
    def longest(self) -> int:
        """Patches of a part at most, but for one that is almost a line."""
        return max(self.most * self.merge**2, (self.side // self.patch) ** 2 if self.tiles[1] > 1 else 0)

    @property
    def most_patches(self) -> int:
        """Of an image."""
        whole = self.most * self.merge**2
        return whole if self.tiles[1] == 1 else max(whole, self.tiles[1] * (self.side // self.patch) ** 2 + whole)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width in pixels of all of it in one part: whole squares."""
        each = self.patch * self.merge
        rows, columns = (max(each, round(side / each) * each) for side in (height, width))
        if rows * columns > self.most * each**2:
            shrink = math.sqrt(height * width / (self.most * each**2))
            rows, columns = (max(each, math.floor(side / shrink / each) * each) for side in (height, width))
        elif rows * columns < self.fewest * each**2:
            grow = math.sqrt(self.fewest * each**2 / (height * width))
            rows, columns = (math.ceil(side * grow / each) * each for side in (height, width))
        return rows, columns

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: 1 x 1 where it is not cut; else of the ratio that is nearest, and of as near ones
        the most that the image fills by half."""
        each = self.patch * self.merge
        rows, columns = (max(self.patch, round(side / each) * each) for side in (height, width))
        if self.tiles[1] == 1 or rows * columns <= self.most * each**2 * self.tolerance:
            return 1, 1
        best, found, (least, most) = float("inf"), (1, 1), self.tiles
        some = range(least, most + 1)
        every = [(c, r) for n in some for c in range(1, n + 1) for r in range(1, n + 1) if least <= c * r <= most]
        # By a set, as transformers has it, whose order decides between those of as many tiles.
        for columns, rows in sorted(set(every), key=math.prod):
            off = abs(width / height - columns / rows)
            if off < best or (off == best and height * width > 0.5 * self.side**2 * columns * rows):
                best, found = off, (rows, columns)
        return found

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> TiledPicture of parts, whose inputs have a row for each patch: "pixels" float32 [P, patch,
        patch, 3], "windows" int32 [P], the number of its part, and "rows" and "columns" float32 [P, learned], what it
        has of each row and column of the learned positions. Raises ShardlmError for one that is almost a line."""
        tiles, size = self.grid(*pixels.shape[:2]), self.size(*pixels.shape[:2])
        if math.prod(size) > self.longest * self.patch**2:
            raise ShardlmError(
                f"an image of {pixels.shape[1]} x {pixels.shape[0]} pixels becomes one of {size[1]} x {size[0]}, and "
                f"the model's encoder takes {self.longest} patches of {self.patch} x {self.patch}; crop it"
            )
        every = []
        if math.prod(tiles) > 1:
            every += cut(self.pixels.resized(pixels, tiles[0] * self.side, tiles[1] * self.side), self.side)
        if self.whole or not every:
            every.append(self.pixels.resized(pixels, *size))
        parts = [self._part(part, number) for number, part in enumerate(every)]
        inputs = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return TiledPicture(inputs, (1, len(inputs["windows"]) // self.merge**2), known_by(pixels, self), tiles)

    def _part(self, part: np.ndarray, number: int) -> dict[str, np.ndarray]:
        size = part.shape[0] // self.patch, part.shape[1] // self.patch
        row, column = places(*size, self.merge)
        return {
            "pixels": patches(self.pixels.numbers(part), self.patch, self.merge),
            "windows": np.full(len(row), number, np.int32),
            "rows": spread(size[0], self.learned)[row],
            "columns": spread(size[1], self.learned)[column],
        }

    @property
    def of_tile(self) -> int:
        """Vectors of a tile."""
        return (self.side // self.patch // self.merge) ** 2


def spread(count: int, learned: int) -> np.ndarray:
    """Along one axis what each of so many has of so many learned: float32 [count, learned]; linear between centres, and
    where there are fewer over as many as each stands for, as PyTorch's with antialias."""
    scale = np.float32(learned) / np.float32(count)
    centre = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    away = np.abs(np.arange(learned, dtype=np.float32) - centre[:, None]) / max(scale, np.float32(1))
    found = np.maximum(1 - away, 0)
    return found / found.sum(-1, keepdims=True)
