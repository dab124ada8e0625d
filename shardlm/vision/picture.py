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
class Clip:
    """A video, prepared for one model, as pictures of the frames that its encoder reads together.

    pictures  in the order of time
    tokens    those in its place in a prompt
    spans     of each picture, where its own are among them: (the first, one past the last)
    times     of each, how far after the first it is on the axis of time, where they share one place on it and tokens
              between them do not say when they are; (): they follow each other as images do
    """

    pictures: tuple[Picture, ...]
    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]
    times: tuple[int, ...] = ()

    @property
    def vectors(self) -> int:
        """Of all pictures."""
        return sum(one.vectors for one in self.pictures)


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A picture in a prompt.

    start  the first of its tokens
    end    one past the last
    takes  int32 [vectors], ascending: the tokens that stand for its vectors, in their order; those between (the ends of
           rows, say) are ordinary ones
    time   how far it is after the first of its video on the axis of time
    last   whether what follows stands after it: not so of a picture that shares the next one's place (Clip.times)
    """

    picture: Picture
    start: int
    end: int
    takes: np.ndarray
    time: int = 0
    last: bool = True

    @property
    def known_by(self) -> bytes:
        """What is the same of two only where their tokens are, at equal distances."""
        return self.picture.digest + (b"" if self.last and not self.time else b"%d.%d" % (self.time, self.last))


def expanded(
    ids: Sequence[int],
    pictures: Sequence[Picture],
    token: int,
    vectors: Collection[int],
    tokens_of: Callable[[Picture], Sequence[int]],
    joins: Mapping[tuple[int, int], int] = _NONE,
    clips: Sequence[Clip] = (),
    clip_token: int | None = None,
) -> tuple[list[int], tuple[Placed, ...]]:
    """A prompt in which each `token` stands for the next of `pictures`, with all tokens of theirs: (ids, where the
    pictures are). `tokens_of(picture)` are those in its place, of which those of `vectors` take its vectors;
    `joins`: (a token, the next) -> the one that stands for both, where one of a picture's is beside another. Each
    `clip_token` stands for the next of `clips`, whose pictures are among those that are told of. Raises
    ShardlmError where there are more or fewer pictures, or videos, than places for them."""
    _check_places(ids, token, len(pictures), "image")
    if clip_token is not None:
        _check_places(ids, clip_token, len(clips), "video")
    found, placed, left, videos = [], [], iter(pictures), iter(clips)
    after = False  # a picture
    for id in ids:
        if id == clip_token:
            placed += _of_clip(clip := next(videos), len(found))
            found += clip.tokens
            after = False
            continue
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


def _check_places(ids: Sequence[int], token: int | None, count: int, kind: str) -> None:
    if (places := sum(id == token for id in ids)) != count:
        raise ShardlmError(
            f"the prompt has places for {places} {kind}s and comes with {count}; give as many {kind}s as it has "
            f"{kind} tokens"
        )


def _of_clip(clip: Clip, at: int) -> list[Placed]:
    """Its pictures, the first of its tokens being the prompt's `at`th."""
    found, times = [], clip.times or (0,) * len(clip.pictures)
    for i, (picture, (start, end), time) in enumerate(zip(clip.pictures, clip.spans, times, strict=True), 1):
        takes = np.arange(at + start, at + end, dtype=np.int32)
        found.append(Placed(picture, at + start, at + end, takes, time, not clip.times or i == len(times)))
    return found
