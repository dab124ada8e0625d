"""A reply as blocks that follow each other, texts, thoughts and calls, of which the last one grows: what the items of
responses and the content of messages have in common."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from shardlm.serve.api.reasoning.marks import Thought
from shardlm.serve.api.tools.reader import CallDelta
from shardlm.serve.api.turns import Piece
from shardlm.serve.messages import read_arguments
from shardlm.serve.past_calls import INVALID_JSON

Kind = Literal["text", "thought", "call"]


@dataclasses.dataclass
class Block:
    """index: blocks before it. text: so far; of a call its arguments. name: of the function that a call is of."""

    kind: Kind
    index: int
    text: str = ""
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens to a block. new: the text by which it grows, which its own text has already."""

    what: Literal["begins", "grows", "ends"]
    block: Block
    new: str = ""


def arguments_of(text: str) -> dict[str, Any]:
    """Of a call, which may have been cut off, or be no object."""
    found = read_arguments(text or "{}")
    return found if isinstance(found, dict) else {INVALID_JSON: text}


class Blocks:
    """Push the pieces of one reply. Space around calls and after thoughts makes no text of its own; where blocks are
    trimmed, nor is it part of one."""

    def __init__(self, trims: bool = False):
        self._trims = trims
        self._open: Block | None = None
        self._count = 0
        self._space = ""  # of a text that may go on, or begin

    def push(self, pieces: Iterable[Piece]) -> Iterator[Step]:
        for piece in pieces:
            if isinstance(piece, CallDelta):
                yield from self._call(piece)
            elif isinstance(piece, Thought):
                self._space = ""
                yield from self._grows("thought", piece.text)
            else:
                yield from self._text(piece)

    def end(self) -> Iterator[Step]:
        """Nothing follows."""
        rest, self._space = self._space, ""
        if rest and (self._is("text") or not self._count):
            yield from self._grows("text", rest)
        yield from self._close()

    def _text(self, text: str) -> Iterator[Step]:
        text = self._space + text
        follows = self._count > 0 and not self._is("text")
        if self._trims and follows:
            text = text.lstrip()
        words = text.rstrip() if self._trims or (follows and not text.strip()) else text
        self._space = text[len(words) :]
        if words:
            yield from self._grows("text", words)

    def _call(self, piece: CallDelta) -> Iterator[Step]:
        self._space = ""
        if piece.name is not None:
            yield from self._begin("call", piece.name)
        yield from self._grows("call", piece.arguments)

    def _grows(self, kind: Kind, text: str) -> Iterator[Step]:
        if not self._is(kind):
            yield from self._begin(kind)
        self._open.text += text
        yield Step("grows", self._open, text)

    def _begin(self, kind: Kind, name: str = "") -> Iterator[Step]:
        yield from self._close()
        self._open = Block(kind, self._count, name=name)
        self._count += 1
        yield Step("begins", self._open)

    def _close(self) -> Iterator[Step]:
        if self._open is not None:
            yield Step("ends", self._open)
            self._open = None

    def _is(self, kind: Kind) -> bool:
        return self._open is not None and self._open.kind == kind
