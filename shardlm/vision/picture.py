"""An image as a model's encoder reads it, and its place in a prompt. No jax."""

import dataclasses
import types
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from shardlm.errors import ShardlmError

_NONE: Mapping = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """One image, prepared for one model.

    inputs  what the encoder is called with, each [P, ...] with a row for each patch, in the encoder's own order
    grid    (rows, columns) of the vectors that it makes, which stand row by row
    digest  what images are known by: that of two is the same only where they are, and were prepared alike
    """

    inputs: Mapping[str, np.ndarray]
    grid: tuple[int, int]
    digest: bytes

    @property
    def patches(self) -> int:
        """Rows of `inputs`."""
        return len(next(iter(self.inputs.values())))

    @property
    def vectors(self) -> int:
        """How many the encoder makes of it."""
        return self.grid[0] * self.grid[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A picture in a prompt.

    start  the first of its tokens
    end    one past the last
    takes  int32 [vectors], ascending: the tokens that stand for its vectors, in their order; those between (the ends of
           rows, say) are ordinary ones
    """

    picture: Picture
    start: int
    end: int
    takes: np.ndarray


def expanded(
    ids: Sequence[int],
    pictures: Sequence[Picture],
    token: int,
    vectors: Collection[int],
    tokens_of: Callable[[Picture], Sequence[int]],
    joins: Mapping[tuple[int, int], int] = _NONE,
) -> tuple[list[int], tuple[Placed, ...]]:
    """A prompt in which each `token` stands for the next of `pictures`, with all tokens of theirs: (ids, where the
    pictures are). `tokens_of(picture)` are those in its place, of which those of `vectors` take its vectors;
    `joins`: (a token, the next) -> the one that stands for both, where one of a picture's is beside another. Raises
    ShardlmError where there are more or fewer pictures than places for them."""
    if (count := sum(id == token for id in ids)) != len(pictures):
        raise ShardlmError(
            f"the prompt has places for {count} images and comes with {len(pictures)}; give as many images as it has "
            "image tokens"
        )
    found, placed, left = [], [], iter(pictures)
    after = False  # a picture
    for id in ids:
        own = [int(id)] if id != token else tokens_of(picture := next(left))
        if (after or id == token) and found and (found[-1], own[0]) in joins:
            found[-1], own = joins[found[-1], own[0]], own[1:]
        after, start = id == token, len(found)
        if not after:
            found += own
            continue
        takes = start + np.flatnonzero([id in vectors for id in own]).astype(np.int32)
        if len(takes) != picture.vectors:
            raise ShardlmError(f"an image has {picture.vectors} vectors and {len(takes)} tokens that take one")
        found += own
        placed.append(Placed(picture, start, len(found), takes))
    return found, tuple(placed)
