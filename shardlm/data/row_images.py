"""The images in the rows of a batch: where their vectors go, and each as the model's encoder reads it once it is asked
for. Which row has which tokens is packing.py's."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from shardlm.data.shards import ShownImage, TokenShards
from shardlm.errors import ShardlmError
from shardlm.vision.axes import axes_of
from shardlm.vision.picture import Picture, Placed
from shardlm.vision.read import pixels_of
from shardlm.vision.sight import Sight

_NOTHING = np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageAt:
    """An image in a batch.

    row      of the global batch
    takes    int32 [vectors], ascending: the places in the row that take its vectors, in their order
    patches  that the encoder reads
    picture  reads and prepares it. Raises ShardlmError that names shard and document where its file is damaged, and
             where it is no longer prepared as it was when its tokens were made
    same     what all that are one image have in common; None: it is like no other
    """

    row: int
    takes: np.ndarray
    patches: int
    picture: Callable[[], Picture]
    same: Hashable = None


Look = Callable[[Sequence[ImageAt]], Any]
"""(the images of a global batch, in the order of their rows and places) -> what the batch has as "images"."""


def image_at(shards: TokenShards, image: ShownImage, row: int, place: int, sight: Sight) -> ImageAt:
    """`place`: of its first token in the row."""
    takes, same = shards.takes(image) + place, shards.file_at(image)
    return ImageAt(row, takes, image.patches, lambda: _picture(shards, image, sight), same)


def turns_of(images: Sequence[ShownImage], start: int, length: int) -> np.ndarray:
    """int32 [length, 3]: where the tokens of a document from `start` on are on the axes of time, row and column, as of
    a prompt that begins there."""
    placed = [Placed(Picture({}, one.grid, b""), one.first - start, one.end - start, _NOTHING) for one in images]
    return axes_of(length, placed)[0].T


def _picture(shards: TokenShards, image: ShownImage, sight: Sight) -> Picture:
    try:
        picture = sight.prepare(pixels_of(shards.image_file(image)))
    except ShardlmError as error:
        raise ShardlmError(f"{shards.where(image)}: {error}") from error
    if (picture.grid, picture.patches) != (image.grid, image.patches):
        raise ShardlmError(
            f"{shards.where(image)}: an image has {image.grid[0]} x {image.grid[1]} vectors of {image.patches} "
            f"patches, and is now prepared as {picture.grid[0]} x {picture.grid[1]} of {picture.patches}: restore "
            "data.max_pixels and the model's preprocessor_config.json, or prepare the conversations again"
        )
    return picture
