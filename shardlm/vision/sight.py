"""What a checkpoint that sees says of it: one value for each family, made from its files."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.picture import Clip, Picture, Placed, expanded
from shardlm.vision.video import Prepare


@dataclasses.dataclass(frozen=True)
class Videos:
    """How a checkpoint sees videos, whose frames its encoder of images reads.

    token    that stands for one video in what its chat template writes
    prepare  video.Video -> video.Planned, whose frames are to be read
    asks     names by which a request may have its videos prepared otherwise
    around   the tokens that the template writes before and after it and the model is not given, as those of each of its
             pictures have them (Qwen3-VL); (): none
    """

    token: int
    prepare: Prepare
    asks: tuple[str, ...] = ()
    around: tuple[int, ...] = ()

    def bare(self, ids: Sequence[int]) -> Sequence[int]:
        """A prompt's tokens without those `around` a place."""
        if not self.around:
            return ids
        ids, begin, end = list(ids), *self.around
        whole = [i for i in range(1, len(ids) - 1) if ids[i - 1 : i + 2] == [begin, self.token, end]]
        left_out = {i + side for i in whole for side in (-1, 1)}
        return [id for i, id in enumerate(ids) if i not in left_out]


@dataclasses.dataclass(frozen=True)
class Sight:
    """How a checkpoint sees.

    token    that stands for one image in what its chat template writes
    vector   of those in its place, the one that stands for each vector of the encoder (often the same)
    also     further tokens of those that stand for vectors, among `tokens`
    prepare  pixels uint8 [height, width, 3] -> Picture: resized, normalised, cut into patches. Raises ShardlmError for
             what cannot be (a side too long for the other)
    tokens   Picture -> the tokens in its place
    sizes    patches that programs of the encoder have, ascending; an image has at most the last
    encoder  configuration of the encoder (encoder.py)
    merged   patches that one vector is made of
    deep     how many layers, from the first, are given vectors of their own beside those that the embedding's place
             takes: DeepStack (https://arxiv.org/abs/2511.21631). A vector has (1 + deep) * D numbers
    axes     whether tokens have positions on three axes (M-RoPE, https://arxiv.org/abs/2409.12191, section 2.1)
    whole    whether the tokens of an image see all of it, those after them too (Gemma 3)
    prefix   whether those of a prompt see all of that, with `whole` (PaliGemma)
    arranged  a prompt's tokens, `token` for each image among them, as the model has them in their order; None: so
    fewer    whether an image may have fewer vectors than its patches make: what is around it is left out, or they are
             made fewer
    joins    (a token, the next): the one that tokenizers write for both, where an image's first or last meets what is
             beside it
    asks     names by which a request may have its images prepared otherwise (`asked`)
    videos   how it sees videos; None: it sees none
    """

    token: int
    vector: int
    prepare: Callable[[np.ndarray], Picture]
    tokens: Callable[[Picture], Sequence[int]]
    sizes: tuple[int, ...]
    encoder: Any
    merged: int = 1
    deep: int = 0
    axes: bool = False
    whole: bool = False
    prefix: bool = False
    also: tuple[int, ...] = ()
    arranged: Callable[[Sequence[int]], Sequence[int]] | None = None
    fewer: bool = False
    joins: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    asks: tuple[str, ...] = ()
    videos: Videos | None = None

    @property
    def untrained(self) -> str:
        """Why there is no training on images; "": there is."""
        if self.prefix:
            return "all tokens of a prompt see each other in this model, which those of packed rows do not"
        if self.also:
            return "tokens around them stand for vectors too in this model, and shards know of one that does"
        return ""

    def up_to(self, vectors: int) -> "Sight":
        """With programs for images of so many vectors, and no longer ones than that takes."""
        if self.fewer:
            return self
        enough = next((size for size in self.sizes if size >= vectors * self.merged), self.sizes[-1])
        return dataclasses.replace(self, sizes=tuple(size for size in self.sizes if size <= enough))

    def asked(self, how: Mapping[str, Any]) -> "Sight":
        """Which prepares images and videos otherwise, by the names of preprocessor_config.json. Raises ShardlmError for
        other names than `asks` has, or those of videos, and for larger images than there are programs for."""
        of_videos = self.videos.asks if self.videos else ()
        if unknown := [name for name in how if name not in self.asks and name not in of_videos]:
            known = dict.fromkeys((*self.asks, *of_videos))
            takes = f"takes {', '.join(known)}" if known else "has images of one size"
            raise ShardlmError(f"mm_processor_kwargs has {unknown[0]!r}, and this model {takes}; leave it out")
        given = {name: value for name, value in how.items() if value is not None}
        own = {name: value for name, value in given.items() if name in self.asks}
        found = dataclasses.replace(self, prepare=self.prepare.asked(own)) if own else self
        own = {name: value for name, value in given.items() if name in of_videos}
        if not own:
            return found
        return dataclasses.replace(
            found, videos=dataclasses.replace(self.videos, prepare=self.videos.prepare.asked(own))
        )

    def expanded(
        self, ids: Sequence[int], pictures: Sequence[Picture], clips: Sequence[Clip] = ()
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """A prompt with all tokens of its pictures and videos (picture.py's `expanded`). Without videos, their token is
        as others."""
        ids = self.arranged(ids) if self.arranged and self.token in ids else ids
        vectors, token = (self.vector, *self.also), self.videos.token if clips else None
        return expanded(ids, pictures, self.token, vectors, self.tokens, self.joins, clips, token)
