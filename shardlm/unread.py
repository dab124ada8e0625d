"""Arrays that are read when a part of them is asked for, so that a model may be larger than memory. Where they lie, and
how they are read, is for whoever makes one."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

Index = tuple[slice, ...]
BLOCK_BYTES = 256 * 2**20  # that are read, changed or written at once


@dataclasses.dataclass(frozen=True)
class Unread:
    """An array somewhere.

    shape, dtype  as an array's
    fetch         reads the part that slices say, with a start and a stop for each dimension
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[Index], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def part(self, at: Sequence[int] = (), dtype: np.dtype | None = None) -> np.ndarray:
        """self[at] in `dtype`, its own by default; beside that a block is in memory."""
        out = np.empty(self.shape[len(at) :], dtype or self.dtype)
        for index in blocks(out.shape, BLOCK_BYTES // self.dtype.itemsize):
            found = self.fetch((*(slice(i, i + 1) for i in at), *index))
            out[index] = found[(0,) * len(at)]
        return out


def blocks(shape: Sequence[int], numbers: int) -> Iterator[Index]:
    """The parts that cut an array in order, of at most so many numbers and about alike: some places of one dimension,
    with one place of those before it and all of those behind it."""
    if not shape:
        yield ()
        return
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= max(1, numbers))
    most = max(1, numbers // max(1, math.prod(shape[axis + 1 :])))
    rows = -(-shape[axis] // max(1, -(-shape[axis] // most)))
    behind = tuple(slice(0, n) for n in shape[axis + 1 :])
    for place in np.ndindex(*shape[:axis]):
        for first in range(0, shape[axis], max(1, rows)):
            rest = slice(first, min(first + rows, shape[axis]))
            yield (*(slice(i, i + 1) for i in place), rest, *behind)
