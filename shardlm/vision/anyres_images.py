"""Images as LLaVA-NeXT (https://llava-vl.github.io/blog/2024-01-30-llava-next/) and LLaVA-OneVision
(https://arxiv.org/abs/2408.03326, section 3.2) read them: first all of it in one tile, then in tiles on a canvas of one
of some sizes, with black around; of the vectors on the canvas those are left that show the image, in rows that each end
with a newline, and in OneVision fewer where they would be many. No jax."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels, edges, known_by
from shardlm.vision.picture import Picture
from shardlm.vision.read import MAX_PIXELS
from shardlm.vision.tiles import TiledPicture, cut, tile_inputs

NEWLINE = 0  # of `near`, in which vectors of patches are counted from 1


@dataclasses.dataclass(frozen=True)
class AnyresImages:
    """side: pixels of a tile's, of which the encoder reads whole patches; canvases: (height, width) in pixels; patch:
    pixels of a patch's side; most: tiles as whose vectors those of an image are at most, 0: it has all."""

    side: int
    canvases: tuple[tuple[int, int], ...]
    patch: int
    most: int
    pixels: Pixels

    @classmethod
    def told(
        cls, told: Mapping[str, Any], side: int, patch: int, canvases: Sequence[Sequence[int]], most: int = 0
    ) -> "AnyresImages":
        """By what a folder says of it, for an encoder of `side` pixels; `canvases` by config.json. Raises ShardlmError
        where both do not say the same, and for sizes that are not of whole tiles."""
        size = edges(told, {"height": side})
        crop = told.get("crop_size") or side
        found = size.get("shortest_edge") or size.get("height"), crop if isinstance(crop, int) else crop.get("height")
        if found != (side, side):
            raise ShardlmError(
                f"the folder prepares images with size={size}, crop_size={crop}, and its encoder reads {side} x {side} "
                "pixels; correct them in its preprocessor_config.json"
            )
        own = tuple(tuple(map(int, pair)) for pair in told.get("image_grid_pinpoints") or canvases)
        if own != tuple(tuple(map(int, pair)) for pair in canvases):
            raise ShardlmError(
                "config.json and preprocessor_config.json have different image_grid_pinpoints; download them again"
            )
        if wrong := [
            pair for pair in own if min(pair) < side or any(n % side for n in pair) or math.prod(pair) > MAX_PIXELS
        ]:
            raise ShardlmError(
                f"config.json has image_grid_pinpoints with {list(wrong[0])}; each needs a height and a width of whole "
                f"tiles of {side} pixels, and at most {MAX_PIXELS} pixels"
            )
        return cls(side, own, patch, most, Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD))

    @property
    def across(self) -> int:
        """Patches of a tile's side."""
        return self.side // self.patch

    @property
    def tiles(self) -> int:
        """Of a canvas at most."""
        return max(math.prod(pair) for pair in self.canvases) // self.side**2

    def sizes(self) -> tuple[int, ...]:
        """Patches that programs have: of 2, 3, 5, 9, ... tiles, with places for the newlines."""
        counts = [*(2**power for power in range((self.tiles - 1).bit_length())), self.tiles]
        return tuple((count + 1) * self.across**2 + count * self.across for count in dict.fromkeys(counts))

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """That on which most of an image's pixels are left, and of as good ones the smallest."""

        def left(canvas: tuple[int, int]) -> int:
            scale = min(canvas[1] / width, canvas[0] / height)
            return min(int(width * scale) * int(height * scale), width * height)

        best = max(self.canvases, key=lambda canvas: (left(canvas), -math.prod(canvas)))
        if not left(best):
            raise ShardlmError(
                f"an image of {width} x {height} pixels has none left in one direction on a canvas of {best[1]} x "
                f"{best[0]}; crop it"
            )
        return best

    def on_canvas(self, pixels: np.ndarray, canvas: tuple[int, int]) -> np.ndarray:
        """The image in the middle of it, as large as fits: uint8 [*canvas, 3]."""
        height, width = pixels.shape[:2]
        by_height, by_width = canvas[0] / height, canvas[1] / width
        if by_width < by_height:
            size = min(math.ceil(height * by_width), canvas[0]), canvas[1]
        else:
            size = canvas[0], min(math.ceil(width * by_height), canvas[1])
        top, left = ((whole - own) // 2 for whole, own in zip(canvas, size, strict=True))
        filled = np.zeros((*canvas, 3), np.uint8)
        filled[top : top + size[0], left : left + size[1]] = self.pixels.resized(pixels, *size)
        return filled

    def shown(self, height: int, width: int, grid: tuple[int, int]) -> np.ndarray:
        """Where those vectors stand that show the image, of a grid of rows and columns on the canvas that are numbered
        row by row: int64 [rows, columns]."""
        rows, columns = grid
        if width / height > columns / rows:
            above, beside = (rows - int(round(height * (columns / width), 7))) // 2, 0
        else:
            above, beside = 0, (columns - int(round(width * (rows / height), 7))) // 2
        return np.arange(rows * columns).reshape(grid)[above : rows - above, beside : columns - beside]

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> TiledPicture: "pixels" float32 [P, patch, patch, 3], and of each of the image's vectors
        "near" int32 [P, taps], of which vectors of patches it is made (from 1; 0: the newline), with "shares"."""
        height, width = pixels.shape[:2]
        canvas = self.canvas(height, width)
        whole = self.pixels.resized(pixels, self.side, self.side)
        every = [whole, *cut(self.on_canvas(pixels, canvas), self.side)]
        tiles = canvas[0] // self.side, canvas[1] // self.side
        shown = self._patches(self.shown(height, width, (tiles[0] * self.across, tiles[1] * self.across)), tiles[1])
        near, shares = self._near(shown)
        read = self.across * self.patch
        numbers = (self.pixels.numbers(tile)[:read, :read] for tile in every)
        inputs = tile_inputs(numbers, self.patch, 1) | {"near": near, "shares": shares}
        rows = max(map(len, inputs.values()))
        padded = {n: np.pad(a, [(0, rows - len(a)), *[(0, 0)] * (a.ndim - 1)]) for n, a in inputs.items()}
        return TiledPicture(padded, (1, len(near)), known_by(pixels, self), tiles)

    def _patches(self, places: np.ndarray, columns: int) -> np.ndarray:
        """From places on a canvas of so many columns of tiles to patches behind the tile that shows all, from 1."""
        row, column = np.divmod(places, columns * self.across)
        tile = row // self.across * columns + column // self.across
        inside = row % self.across * self.across + column % self.across
        return 1 + (tile + 1) * self.across**2 + inside

    def _near(self, shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(int32, float32) [vectors, taps]: all of the first tile, then the rows of what is shown with their ends."""
        first = 1 + np.arange(self.across**2)
        if not self.most:
            ended = np.pad(shown, [(0, 0), (0, 1)], constant_values=NEWLINE)
            near = np.concatenate([first, ended.ravel()])[:, None].astype(np.int32)
            return near, np.ones(near.shape, np.float32)
        near, shares = self._fewer(shown)
        near = np.pad(near, [(0, 0), (0, 1), (0, 0)], constant_values=NEWLINE).reshape(-1, 4)
        alone = np.eye(1, 4, dtype=np.float32)[0]
        ends = np.broadcast_to(alone, (len(shares), 1, 4))
        shares = np.concatenate([shares, ends], axis=1).reshape(-1, 4)
        near = np.concatenate([np.pad(first[:, None], [(0, 0), (0, 3)], mode="edge"), near]).astype(np.int32)
        return near, np.concatenate([np.broadcast_to(alone, (len(first), 4)), shares]).astype(np.float32)

    def _fewer(self, shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[rows, columns, 4]: four that are near each, and their shares; between fewer than there are where those were
        more than `most` tiles have by a fifth."""
        size = shown.shape
        ratio = math.sqrt(math.prod(size) / (self.most * self.across**2))
        if ratio > 1.1:
            size = int(size[0] // ratio), int(size[1] // ratio)
        (row, row_share), (column, share) = (_between(*each) for each in zip(size, shown.shape, strict=True))
        near = shown[row[:, None, :, None], column[None, :, None, :]]
        shares = row_share[:, None, :, None] * share[None, :, None, :]
        return near.reshape(*size, 4), shares.reshape(*size, 4)


def _between(count: int, there: int) -> tuple[np.ndarray, np.ndarray]:
    """Along one axis: of so many, centres to centres, the two of those that are there around each, and their shares:
    (int64, float32) [count, 2]."""
    at = np.maximum((np.arange(count) + 0.5) * (there / max(count, 1)) - 0.5, 0).astype(np.float32)
    first = np.floor(at).astype(np.int64)
    near = np.minimum(np.stack([first, first + 1], axis=-1), there - 1)
    return near, np.stack([1 - (at - first), at - first], axis=-1)
