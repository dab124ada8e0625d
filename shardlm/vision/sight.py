"""What a checkpoint that sees says of it: one value for each family, made from its files."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.vision.picture import Picture, Placed, expanded


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
        """Which prepares images otherwise, by the names of preprocessor_config.json. Raises ShardlmError for other
        names than `asks` has, and for larger images than there are programs for."""
        if unknown := [name for name in how if name not in self.asks]:
            takes = f"takes {', '.join(self.asks)}" if self.asks else "has images of one size"
            raise ShardlmError(f"mm_processor_kwargs has {unknown[0]!r}, and this model {takes}; leave it out")
        given = {name: value for name, value in how.items() if value is not None}
        return dataclasses.replace(self, prepare=self.prepare.asked(given)) if given else self

    def expanded(self, ids: Sequence[int], pictures: Sequence[Picture]) -> tuple[list[int], tuple[Placed, ...]]:
        """A prompt with all tokens of its pictures (picture.py's `expanded`)."""
        ids = self.arranged(ids) if self.arranged and self.token in ids else ids
        return expanded(ids, pictures, self.token, (self.vector, *self.also), self.tokens, self.joins)
