"""Images for the towers of Qwen's models: to which size they are brought, and their patches in the order that those
towers have them in. No jax.

Patches stand by the blocks that one vector is made of (merge times merge), blocks row by row; where a tower attends in
windows, blocks stand window by window. Pixels stay bytes: the tower brings them to its own scale. transformers'
image_processing_pil_qwen2_vl.py and vision_utils.py are the definition.
"""

import dataclasses
import hashlib
import math
from collections.abc import Mapping

import numpy as np
import PIL.Image

from shardlm.errors import ShardlmError
from shardlm.vision.picture import Picture

LONGEST = 200  # one side over the other


@dataclasses.dataclass(frozen=True)
class Preparation:
    """How pixels become a Picture.

    patch, merge  pixels along a side of a patch, patches along a side of a block
    fewest, most  pixels of an image
    resample      PIL's filter
    window        blocks along a side of a window; 0: there are none
    side          learned positions along a side; 0: there are none
    limit         patches that the tower takes
    """

    patch: int
    merge: int
    fewest: int
    most: int
    resample: int = PIL.Image.Resampling.BICUBIC
    window: int = 0
    side: int = 0
    limit: int = 1 << 16

    def __call__(self, pixels: np.ndarray) -> Picture:
        """pixels uint8 [height, width, 3]. Inputs of its Picture, each with a row for a patch:

        pixels  uint8 [P, 3 * patch * patch], colour by colour
        at      int32 [P, 2], its row and column
        window  int32 [P], the number of its window, ascending          where there are windows
        source  int32 [P], of a block's patches which block is to stand there when all are row by row     there too
        near    int32 [P, 4], the learned positions around it, and
        shares  float32 [P, 4], what it has of each                     where there are such

        Raises ShardlmError for one that is too long, or has more patches than the tower takes.
        """
        factor = self.patch * self.merge
        height, width = resized(*pixels.shape[:2], factor, self.fewest, self.most)
        rows, columns = height // self.patch, width // self.patch
        if rows * columns > self.limit:
            raise ShardlmError(
                f"an image of {pixels.shape[1]} x {pixels.shape[0]} makes {rows * columns} patches and the model's "
                f"encoder takes {self.limit}; send a smaller one"
            )
        if (height, width) != pixels.shape[:2]:
            image = PIL.Image.fromarray(pixels).resize((width, height), PIL.Image.Resampling(self.resample))
            pixels = np.asarray(image)
        inputs = {"pixels": patches(pixels, self.patch, self.merge), "at": places(rows, columns, self.merge)}
        if self.side:
            inputs["near"], inputs["shares"] = around(inputs["at"], (rows, columns), self.side)
        grid = rows // self.merge, columns // self.merge
        if self.window:
            inputs = in_windows(inputs, grid, self.window, self.merge**2)
        digest = hashlib.blake2b(f"{height}x{width}".encode(), digest_size=16)
        digest.update(np.ascontiguousarray(pixels))
        return Picture(inputs, grid, digest.digest())


def resized(height: int, width: int, factor: int, fewest: int, most: int) -> tuple[int, int]:
    """Height and width that an image is brought to: multiples of `factor`, with about its own proportions and from
    `fewest` to `most` pixels. Raises ShardlmError for one that is too long."""
    long, short = max(height, width), min(height, width)
    if not short or long / short > LONGEST:
        raise ShardlmError(
            f"an image of {width} x {height} is longer than {LONGEST} times its other side; cut it, or add a margin"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif rows * columns < fewest:
        grow = math.sqrt(fewest / (height * width))
        rows, columns = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return rows, columns


def patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """[height, width, colours] -> [P, colours * patch * patch], block by block."""
    height, width, colours = pixels.shape
    down, across = height // (patch * merge), width // (patch * merge)
    split = pixels.reshape(down, merge, patch, across, merge, patch, colours)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, colours * patch * patch)


def places(rows: int, columns: int, merge: int) -> np.ndarray:
    """int32 [rows * columns, 2]: row and column of each patch, block by block."""
    row, column = np.mgrid[:rows, :columns].astype(np.int32)
    both = np.stack([row, column], axis=-1).reshape(rows // merge, merge, columns // merge, merge, 2)
    return both.transpose(0, 2, 1, 3, 4).reshape(-1, 2)


def around(at: np.ndarray, grid: tuple[int, int], side: int) -> tuple[np.ndarray, np.ndarray]:
    """The four of side x side learned positions around each patch, int32 [P, 4], and the share of each, float32 [P, 4],
    where the first and the last patch of an axis stand on its ends."""
    near, shares = [], []
    for axis, size in enumerate(grid):
        where = at[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
        first = np.floor(where)
        near.append(np.clip(first[:, None].astype(np.int32) + np.arange(2, dtype=np.int32), 0, side - 1))
        shares.append(np.stack([1 - (where - first), where - first], axis=-1))
    index = near[0][:, :, None] * side + near[1][:, None, :]
    share = shares[0][:, :, None] * shares[1][:, None, :]
    return index.reshape(-1, 4), share.reshape(-1, 4)


def in_windows(
    inputs: Mapping[str, np.ndarray], grid: tuple[int, int], window: int, merged: int
) -> dict[str, np.ndarray]:
    """The same inputs of grid blocks of `merged` patches, those of each window of window x window blocks together, with
    `window` and `source`."""
    row, column = np.divmod(np.arange(grid[0] * grid[1], dtype=np.int32), grid[1])
    number = row // window * -(-grid[1] // window) + column // window
    order = np.argsort(number, kind="stable")
    found = {name: a.reshape(-1, merged, *a.shape[1:])[order].reshape(a.shape) for name, a in inputs.items()}
    each = {"window": number[order], "source": np.argsort(order)}
    return found | {name: np.repeat(a.astype(np.int32), merged) for name, a in each.items()}
