"""Images as the towers of Qwen's models read them: any aspect ratio, within bounds on their pixels. No jax.

Patches stand by the squares that one vector is made of, squares row by row; where a tower attends in windows, squares
stand window by window. Pixels stay bytes: the tower brings them to its own scale. transformers'
image_processing_pil_qwen2_vl.py and vision_utils.py are the definition.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.asked import check_most, edges_asked, number_asked
from shardlm.vision.images import CLIP_MEAN, CLIP_STD, Pixels, known_by, patches, places
from shardlm.vision.picture import Picture

LONGEST = 200  # one side over the other
FEWEST, MOST = 56 * 56, 28 * 28 * 1280  # pixels, where a folder does not say


@dataclasses.dataclass(frozen=True)
class QwenImages:
    """fewest, most: pixels of an image; patch: pixels of a patch's side; merge: patches of a square's side; window:
    squares of a window's side, 0: there are none; side: learned positions of a side, 0: there are none; repeated: how
    often an image stands for the frames that an encoder of videos reads together, 0: it reads no videos."""

    fewest: float
    most: float
    patch: int
    merge: int
    pixels: Pixels
    window: int = 0
    side: int = 0
    repeated: int = 0

    @classmethod
    def told(cls, told: Mapping[str, Any], patch: int, merge: int, frames: int, window: int, side: int) -> "QwenImages":
        """By what a folder says of preparing them (images.processing). Raises ShardlmError where that is not what the
        tower was made for."""
        for name, of_tower in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
            if told.get(name, of_tower) != of_tower:
                raise ShardlmError(
                    f"the folder prepares images with {name}={told[name]} and its vision_config has {of_tower}; "
                    "download its preprocessor_config.json again"
                )
        size = told.get("size") or {}
        fewest = told.get("min_pixels") or size.get("shortest_edge") or FEWEST
        most = told.get("max_pixels") or size.get("longest_edge") or MOST
        if most < (least := max(fewest, (patch * merge) ** 2)):
            raise ShardlmError(f"the folder's images have {fewest} to {most} pixels; the second needs {least} or more")
        return cls(fewest, most, patch, merge, Pixels.told(told, mean=CLIP_MEAN, std=CLIP_STD), window, side)

    def asked(self, how: Mapping[str, Any]) -> "QwenImages":
        """As a request wants its images, of which none has more pixels than the largest here: min_pixels and
        max_pixels, or size with shortest_edge and longest_edge, which are other names of them. Raises ShardlmError."""
        size = edges_asked(how, ("shortest_edge", "longest_edge"))
        fewest = number_asked("min_pixels", how.get("min_pixels", size.get("shortest_edge", self.fewest)))
        most = number_asked("max_pixels", how.get("max_pixels", size.get("longest_edge", self.most)))
        check_most("max_pixels", most, self.most)
        if most < (least := max(fewest, (self.patch * self.merge) ** 2)):
            raise ShardlmError(
                f"mm_processor_kwargs makes images of min_pixels={fewest} to max_pixels={most}; the second must be "
                f"{least} or more"
            )
        return dataclasses.replace(self, fewest=fewest, most=most)

    @property
    def most_patches(self) -> int:
        """Of an image, but for one that is almost a line."""
        return int(self.most // self.patch**2)

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture, whose inputs have a row for each patch:

        pixels   uint8 [P, patch, patch, 3], of an encoder of videos [P, repeated, patch, patch, 3]
        rows, columns  int32 [P], where it stands
        windows  int32 [P], the number of its window, ascending         where there are windows
        source   int32 [P], of a square's patches which square is to stand there when all are row by row     there too
        near     int32 [P, 4], the learned positions around it, and
        shares   float32 [P, 4], what it has of each                    where there are such

        Raises ShardlmError for one that is too long, or as long and narrow as to have more patches than `most_patches`.
        """
        height, width = self.size(*pixels.shape[:2])
        count = height // self.patch * (width // self.patch)
        if count > self.most_patches:
            raise ShardlmError(
                f"an image of {pixels.shape[1]} x {pixels.shape[0]} makes {count} patches and the model's "
                f"encoder takes {self.most_patches}; crop it"
            )
        return self.picture([self.pixels.resized(pixels, height, width)])

    def picture(self, frames: Sequence[np.ndarray]) -> Picture:
        """Of an image, or of `repeated` frames, which have a size that patches fit: uint8 [H, W, 3] each."""
        rows, columns = (side // self.patch for side in frames[0].shape[:2])
        row, column = places(rows, columns, self.merge)
        pixels = [patches(frame, self.patch, self.merge) for frame in frames]
        pixels = np.stack(pixels, axis=1) if self.repeated else pixels[0]
        inputs = {"pixels": pixels, "rows": row, "columns": column}
        if self.side:
            inputs |= self.shares((row, column), (rows, columns))
        grid = rows // self.merge, columns // self.merge
        if self.window:
            inputs = in_windows(inputs, grid, self.window, self.merge**2)
        if len(frames) < self.repeated:  # a view: programs' inputs alone are as large as they look
            own = inputs["pixels"]
            inputs["pixels"] = np.broadcast_to(own, (len(own), self.repeated, *own.shape[2:]))
        bounds_apart = dataclasses.replace(self, fewest=0, most=0)  # which show in the pixels
        known = frames[0] if len(frames) == 1 else np.stack(frames)
        return Picture(inputs, grid, known_by(known, bounds_apart))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image is brought to."""
        return resized_to(height, width, self.patch * self.merge, self.fewest, self.most)

    def shares(self, at: tuple[np.ndarray, np.ndarray], grid: tuple[int, int]) -> dict[str, np.ndarray]:
        """ "near" and "shares" of each patch, by its row and column in a grid of patches."""
        return around(at, grid, self.side)


def resized_to(height: int, width: int, factor: int, fewest: float, most: float) -> tuple[int, int]:
    """Height and width that an image is brought to: multiples of `factor`, with about its own proportions and from
    `fewest` to `most` pixels. Raises ShardlmError for one that is too long."""
    long, short = max(height, width), min(height, width)
    if not short or long / short > LONGEST:
        raise ShardlmError(
            f"an image of {width} x {height} has one side of more than {LONGEST} times the other; crop it"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < fewest:
        grow = math.sqrt(fewest / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def around(at: tuple[np.ndarray, np.ndarray], grid: tuple[int, int], side: int) -> dict[str, np.ndarray]:
    """The four of side x side learned positions around each patch and the share of each, where the first and the last
    patch of an axis stand on the ends of it; `at` are rows and columns [P] in a grid of so many."""
    near, shares = [], []
    for own, size in zip(at, grid, strict=True):
        where = own.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        first = np.floor(where)
        near.append(np.clip(first[:, None].astype(np.int32) + np.arange(2, dtype=np.int32), 0, side - 1))
        shares.append(np.stack([1 - (where - first), where - first], axis=-1))
    index = near[0][:, :, None] * side + near[1][:, None, :]
    share = shares[0][:, :, None] * shares[1][:, None, :]
    return {"near": index.reshape(-1, 4), "shares": share.reshape(-1, 4)}


def in_windows(
    inputs: Mapping[str, np.ndarray], grid: tuple[int, int], window: int, merged: int
) -> dict[str, np.ndarray]:
    """The same inputs of a grid of squares of `merged` patches, those of each window of window x window squares
    together, with `windows` and `source`."""
    row, column = np.divmod(np.arange(grid[0] * grid[1], dtype=np.int32), grid[1])
    number = row // window * -(-grid[1] // window) + column // window
    order = np.argsort(number, kind="stable")
    found = {name: a.reshape(-1, merged, *a.shape[1:])[order].reshape(a.shape) for name, a in inputs.items()}
    each = {"windows": number[order], "source": np.argsort(order)}
    return found | {name: np.repeat(a.astype(np.int32), merged) for name, a in each.items()}
