"""Looking for a text in another that comes character by character. No jax."""

import functools
from collections.abc import Sequence


class TextProgress:
    """How much of a string's beginning the text ends with, followed character by character (Knuth, Morris, Pratt)."""

    def __init__(self, text: str, matched: int = 0):
        self.text = text
        self.matched = matched  # characters, fewer than all
        self._shorter = _shorter(text)

    def advance(self, char: str) -> bool:
        """Whether the string is complete with `char`."""
        self.matched = self._longer(self.matched, char)
        if self.matched < len(self.text):
            return False
        self.matched = self._shorter[self.matched]
        return True

    def _longer(self, matched: int, char: str) -> int:
        return _longer(self.text, self._shorter, matched, char)


@functools.lru_cache(maxsize=256)  # the replies to one prompt have the same strings
def _shorter(text: str) -> Sequence[int]:
    """[n]: the longest beginning of the string, short of n characters, with which its first n end."""
    found = [0, 0]
    for char in text[1:]:
        found.append(_longer(text, found, found[-1], char))
    return found


def _longer(text: str, shorter: Sequence[int], matched: int, char: str) -> int:
    while matched and text[matched] != char:
        matched = shorter[matched]
    return matched + (text[matched] == char)
