"""Thoughts between two marks before the answer, <think> and </think> as most models write them."""

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass(frozen=True)
class Thought:
    """Text of what the model thinks."""

    text: str


class MarkedThoughts:
    """Push the text of a reply; thoughts and contents (texts) come out in order, without the marks, whatever the parts.

    Attributes:
      thinking: whether what comes next is thought; None while the reply has not shown it.
    """

    calls = 0

    def __init__(self, begins: Collection[str], ends: Collection[str], thinking: bool | None):
        """`begins`, `ends`: spellings of the marks. `thinking`: of the reply's first text. Where that is None the reply
        thinks if it begins with a mark, after space; where it is True such a mark is left out."""
        self.thinking = thinking
        self._begins, self._ends = tuple(begins), tuple(ends)
        self._first = thinking is not False
        self._held = ""  # text that may be a mark, or the beginning of one

    @property
    def over(self) -> bool:
        """Nothing that follows is thought."""
        return self.thinking is False

    def push(self, text: str) -> list[str | Thought]:
        self._held += text
        if self._first and not self._begun():
            return []
        found: list[str | Thought] = []
        if self.thinking:
            thought, mark, self._held = until(self._held, self._ends)
            found += [Thought(thought)] if thought else []
            self.thinking = not mark
        if not self.thinking and self._held:
            found.append(self._held)
            self._held = ""
        return found

    def finish(self) -> list[str | Thought]:
        """The rest, when no text follows."""
        rest, self._held = self._held, ""
        if not rest:
            return []
        return [Thought(rest) if self.thinking else rest]

    def _begun(self) -> bool:
        """Whether it is known how the reply begins; takes the mark off."""
        words = self._held.lstrip()
        if any(begin.startswith(words) and begin != words for begin in self._begins):
            return False
        mark = next((begin for begin in self._begins if words.startswith(begin)), "")
        if mark:
            self._held = words[len(mark) :]
        self._first, self.thinking = False, bool(mark or self.thinking)
        return True


def until(text: str, marks: Collection[str]) -> tuple[str, str, str]:
    """(what comes before the first of the marks, that mark, what follows); without one (what cannot be a mark's
    beginning, "", the rest)."""
    places = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if places:
        at, mark = min(places, key=lambda place: place[0])
        return text[:at], mark, text[at + len(mark) :]
    longest = min(max(map(len, marks)) - 1, len(text))
    keep = next(n for n in range(longest, -1, -1) if any(mark.startswith(text[len(text) - n :]) for mark in marks))
    return text[: len(text) - keep], "", text[len(text) - keep :]
