"""Which device reads which image of a batch: host work, the same in every process. What the devices do with it is
seeing.py's."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.picture import Picture
from shardlm.vision.sight import Sight


class ImageAt(Protocol):
    """An image of a batch: `row` of the global batch, `takes` int32 [vectors], the places in it that take its vectors,
    in how many patches it is read, and what those that are the `same` image have in common, None: it is like none."""

    row: int
    takes: np.ndarray
    patches: int
    same: Hashable

    def picture(self) -> Picture: ...


@dataclasses.dataclass(frozen=True)
class Taken:
    """An image in the arrays on the devices: its row there, the places in it, and the first of the vectors that these
    take, numbered over what a group of devices reads in one call."""

    slot: int
    takes: np.ndarray
    first: int


@dataclasses.dataclass(frozen=True)
class Look:
    """One call of the encoder: every device reads an image of at most `size` patches, or none.

    counts  int32 [devices], in how many patches each device's image is, 0: it has none
    inputs  of the devices here, by number: what the encoder reads, [size, ...] each
    taken   all places of the images that are read
    """

    size: int
    counts: np.ndarray
    inputs: Mapping[int, Mapping[str, np.ndarray]]
    taken: tuple[Taken, ...]


@dataclasses.dataclass(frozen=True)
class Readers:
    """Who reads what. Rows are split over `groups` of `each` devices, which are numbered group by group; a group's
    devices read the images of its rows in turn, the largest first, so that those of one call are alike, and each once
    wherever it stands: in rewarded training all replies to a prompt have its images.

    slots  the row of the global batch in each row of the arrays (batches.py)
    here   the devices of this process
    """

    sight: Sight
    groups: int
    each: int
    slots: tuple[int, ...]
    here: frozenset[int]

    def __call__(self, images: Sequence[ImageAt]) -> tuple[Look, ...]:
        """Reads the images of this process's devices, of all of the global batch. Raises ShardlmError for one of more
        patches than are read, and what `picture` raises."""
        slot = {row: place for place, row in enumerate(self.slots)}
        own: list[dict[Hashable, list[ImageAt]]] = [{} for _ in range(self.groups)]
        for number, image in enumerate(images):
            known = ("alone", number) if image.same is None else ("same", image.same)
            own[slot[image.row] * self.groups // len(self.slots)].setdefault(known, []).append(image)
        # Of equal ones the order stays.
        every = [sorted(group.values(), key=lambda alike: -alike[0].patches) for group in own]
        calls = max(-(-len(group) // self.each) for group in every)
        return tuple(self._look([group[i * self.each :][: self.each] for group in every], slot) for i in range(calls))

    def _look(self, groups: Sequence[Sequence[Sequence[ImageAt]]], slot: Mapping[int, int]) -> Look:
        """`groups`: of each the images that are read, each in all its places."""
        size = self._size(max(alike[0].patches for group in groups for alike in group))
        counts, inputs, taken = np.zeros(self.groups * self.each, np.int32), {}, []
        for number, group in enumerate(groups):
            for place, alike in enumerate(group):
                device, first = number * self.each + place, place * (size // self.sight.merged)
                counts[device] = alike[0].patches
                taken += [Taken(slot[image.row], image.takes, first) for image in alike]
                if device in self.here:
                    inputs[device] = _padded(alike[0].picture(), size)
        return Look(size, counts, inputs, tuple(taken))

    def _size(self, patches: int) -> int:
        if patches > (most := self.sight.sizes[-1]):
            raise ShardlmError(
                f"an image of the data has {patches} patches, and at most {most} are read now: restore data.max_pixels "
                "and the model's preprocessor_config.json, or prepare the conversations again"
            )
        return next(size for size in self.sight.sizes if size >= patches)


def _padded(picture: Picture, size: int) -> dict[str, np.ndarray]:
    rest = size - picture.patches
    return {name: np.pad(a, [(0, rest)] + [(0, 0)] * (a.ndim - 1)) for name, a in picture.inputs.items()}
