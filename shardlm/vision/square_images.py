"""Images as encoders of one size read them: a square of so many pixels, whatever the aspect ratio was. No jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.images import Pixels, edges, known_by, patches, places
from shardlm.vision.picture import Picture


@dataclasses.dataclass(frozen=True)
class SquareImages:
    """side: pixels of the square's; patch: of a patch's; merge: patches of a side that one vector is made of."""

    side: int
    patch: int
    merge: int
    pixels: Pixels

    @classmethod
    def told(cls, told: Mapping[str, Any], side: int, patch: int, merge: int, **usual: Any) -> "SquareImages":
        """By what a folder says of it, for an encoder of `side` pixels. Raises ShardlmError where that is not what the
        folder resizes images to."""
        size = edges(told, {"height": side, "width": side})
        if (size.get("height"), size.get("width")) != (side, side):
            raise ShardlmError(
                f"the folder resizes images to {size}, and its encoder reads {side} x {side} pixels; correct size in "
                "its preprocessor_config.json"
            )
        return cls(side, patch, merge, Pixels.told(told, **usual))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of vectors."""
        return (self.side // self.patch // self.merge,) * 2

    def __call__(self, pixels: np.ndarray) -> Picture:
        """uint8 [H, W, 3] -> Picture: "pixels" float32 [P, patch, patch, 3] and "positions" int32 [P], of each in the
        square row by row."""
        each = self.side // self.patch
        rows, columns = places(each, each, self.merge)
        numbers = self.pixels.numbers(self.pixels.resized(pixels, self.side, self.side))
        inputs = {"pixels": patches(numbers, self.patch, self.merge), "positions": rows * each + columns}
        return Picture(inputs, self.grid, known_by(pixels, self))
