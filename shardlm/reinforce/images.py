"""The images of prompts: where their tokens stand, and their files, which are read anew whenever they are needed: to
sample, and for the rows that are trained on. What is kept of one that is prepared is serve/images.py's."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from shardlm.data.line_images import SHOWN, image_file
from shardlm.data.rendering import Seen
from shardlm.data.row_images import ImageAt
from shardlm.errors import ShardlmError
from shardlm.vision.axes import axes_of
from shardlm.vision.picture import Picture, Placed
from shardlm.vision.read import BadImage


@dataclasses.dataclass(frozen=True, eq=False)
class PromptImage:
    """An image in a prompt.

    place      of its tokens, its picture without what the encoder reads
    patches    that the encoder reads
    reference  its file's path, relative to `folder`, or a data URL
    where      FILE:LINE of the prompt
    known_by   digest of the file
    """

    place: Placed
    patches: int
    reference: str
    folder: Path
    where: str
    known_by: bytes

    @classmethod
    def of(cls, place: Placed, seen: Seen, reference: str, folder: Path, where: str) -> "PromptImage":
        """Of one that was prepared."""
        known = dataclasses.replace(place.picture, inputs={})
        place = dataclasses.replace(place, picture=known)
        return cls(place, seen.picture.patches, reference, folder, where, _digest(seen.file))

    def file(self) -> bytes:
        """As it was when the prompt's tokens were made. Raises ShardlmError where it is not there or another one."""
        name = self.reference if len(self.reference) <= SHOWN else f"{self.reference[:SHOWN]}..."
        try:
            found = image_file(self.reference, self.folder)
        except ShardlmError as error:
            raise BadImage(f"{self.where}: {name}: {error}") from error
        if _digest(found) != self.known_by:
            raise ShardlmError(
                f"{self.where}: {name} is another image than when the run began; keep files as they are while it lasts"
            )
        return found

    def prepared(self, prepare: Callable[[bytes], Picture]) -> Picture:
        """As `prepare` has it of the file."""
        return prepare(self.file())


def in_row(images: Sequence[PromptImage], row: int, first: int, prepare: Callable[[bytes], Picture]) -> list[ImageAt]:
    """The images of a prompt that begins at place `first` of a row of the global batch."""
    return [
        ImageAt(row, one.place.takes + first, one.patches, functools.partial(one.prepared, prepare), one.known_by)
        for one in images
    ]


def turns(images: Sequence[PromptImage], length: int) -> np.ndarray:
    """int32 [length, 3]: where the tokens of a prompt and what follows are on the axes of time, row and column."""
    return axes_of(length, [one.place for one in images])[0].T


def _digest(file: bytes) -> bytes:
    return hashlib.blake2b(file, digest_size=16).digest()
