"""Which tokens of a reply are thought: for their count, and for log-probabilities that are the answer's alone."""

import dataclasses
from collections.abc import Sequence

from shardlm.serve.api.reasoning.choose import Splitter
from shardlm.serve.outputs import Place
from shardlm.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Said:
    """A token of a reply; place: what is told of its log-probability, where that is asked for."""

    id: int
    place: Place | None
    thought: bool


class ThoughtTokens:
    """Push the tokens of a reply. A token is thought if some of it is, or a mark's; thoughts: how many are."""

    def __init__(self, splitter: Splitter | None, tokenizer: Tokenizer, skip_special: bool):
        """`splitter`: a new one; None: nothing is thought. `skip_special`: the text is without special tokens."""
        self.thoughts = 0
        self._splitter = splitter
        self._stream = tokenizer.stream(skip_special=skip_special) if splitter else None
        self._undecided: list[tuple[int, Place | None]] = []

    def push(self, ids: Sequence[int], places: Sequence[Place], ended: bool) -> list[Said]:
        """Those of which it is known, in order; at the end all. `places`: of each, or none."""
        found: list[Said] = []
        for i, id in enumerate(ids):
            self._undecided.append((id, places[i] if places else None))
            if (thought := self._is_thought(id)) is not None:
                found += self._decided(thought)
        return found + (self._decided(False) if ended else [])

    def _is_thought(self, id: int) -> bool | None:
        """None: not known yet."""
        if self._splitter is None or self._splitter.over:
            return False
        before = self._splitter.thinking
        self._splitter.push(self._stream.step(id))
        return True if before else self._splitter.thinking

    def _decided(self, thought: bool) -> list[Said]:
        found = [Said(id, place, thought) for id, place in self._undecided]
        self._undecided = []
        self.thoughts += thought * len(found)
        return found
