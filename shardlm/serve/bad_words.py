"""Words that a reply must not contain, and tokens besides which it has none. A word of one token is a bias on the
device (settings.py); of longer ones the last token is masked where the reply has just said those before it."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from shardlm.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class BadWords:
    """The tokens of words, of one and of several."""

    single: tuple[int, ...] = ()
    several: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def make(cls, words: Sequence[str], tokenizer: Tokenizer) -> "BadWords":
        """As a text would begin with them and, where that is as many tokens, as they follow a space (so does vLLM)."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            first, inside = (tuple(tokenizer.encode(before + word.lstrip())) for before in ("", " "))
            found[first] = None
            if len(inside) == len(first):
                found[inside] = None
        whole = [tokens for tokens in found if tokens]
        return cls(
            tuple(tokens[0] for tokens in whole if len(tokens) == 1), tuple(tokens for tokens in whole if tokens[1:])
        )

    def forbid(self, said: Sequence[int], mask: np.ndarray) -> None:
        """Takes the tokens that would end a word out of mask int32 [ceil(V / 32)]; `said` is the reply so far. A mask
        that allows nothing else, which is a grammar's, stays as it is."""
        ends = {word[-1] for word in self.several if tuple(said[len(said) - len(word) + 1 :]) == word[:-1]}
        left = mask.view(np.uint32).copy()
        for token in ends:
            left[token // 32] &= ~np.uint32(1 << token % 32)
        if left.any():
            mask[:] = left.view(np.int32)


def allow_only(tokens: Sequence[int] | None, mask: np.ndarray) -> None:
    """Takes all other tokens out of mask int32 [ceil(V / 32)], unless nothing was left of it; None: takes nothing."""
    if tokens is None:
        return
    ids, own = np.array(tokens), np.zeros(mask.shape, np.uint32)
    np.bitwise_or.at(own, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    left = mask.view(np.uint32) & own
    if left.any():
        mask[:] = left.view(np.int32)
