"""Which programs read chunks of prompts: how many rows and tokens they have, how prompts are cut into chunks, and how
the chunks of a batch are dealt to programs. No jax."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

# A program of fewer tokens takes as long as reading the weights: so many multiply a bfloat16 weight while an H100 loads
# it (989 TFLOP/s, 3.35 TB/s: 295 tokens). On two cores one token of 768 x 12 layers takes 12 ms, and a chunk of 256 as
# long as 14 of these (measured, CPU time): 19 tokens.
WHILE_WEIGHTS_ARE_READ = {"cpu": 32, "gpu": 256}
SHORTEST = 32  # tokens of a row
FEW = tuple(4**i for i in range(12))  # rows of programs that the budget of a batch has more room for

BESIDE = 1 / 4  # of reading the weights, a program's work beside its tokens: the host's, and that of sampling

Size = tuple[int, int]  # rows, tokens of each


@dataclasses.dataclass(frozen=True)
class Cuts:
    """How prompts are cut into chunks: where programs end, so that little is padded.

    lengths  of the programs, the shortest first; () where any chunk is as good as another
    least    tokens that take as long as reading the weights: WHILE_WEIGHTS_ARE_READ
    """

    lengths: tuple[int, ...] = ()
    least: int = 0

    @classmethod
    def of(cls, sizes: Sequence[Size], platform: str) -> "Cuts":
        return cls(tuple(sorted({tokens for _, tokens in sizes})), WHILE_WEIGHTS_ARE_READ[platform])

    def chunk(self, left: int, room: int, prompts: int = 1) -> int:
        """Of `left` tokens of a prompt, how many its next chunk has: as many as there is `room` for, in a program that
        holds them all, or as many as fill a shorter one, whichever makes less work with what is then left. `prompts`
        that are to be read now share the reading of the weights where there is room for them. One of 1,100 tokens is a
        program of 2,048, or one of 1,024 and one of 128: estimated for Llama 3 8B on an H100 53 ms and 33."""
        most = min(left, room)
        if not self.lengths or most <= self.lengths[0]:
            return most
        below = self.lengths[bisect.bisect(self.lengths, most) - 1]
        least = self.least / max(1, min(prompts, room // most))
        whole = self._of_program(most, least) + self._work(left - most, least)
        return below if self._of_program(below, least) + self._work(left - below, least) < whole else most

    def worth(self, left: int, room: int) -> bool:
        """Whether a chunk in so little room is worth a program beside others, or better waits for more room."""
        return left <= room or room >= self.least

    def _work(self, tokens: int, least: float) -> float:
        """Of so many tokens of a prompt, in as many chunks as make it least."""
        most, total = self.lengths[-1], 0.0
        if tokens > most:
            total, tokens = tokens // most * self._of_program(most, least), tokens % most
        best = math.inf
        while tokens:
            best = min(best, total + self._of_program(tokens, least))
            below = bisect.bisect(self.lengths, tokens) - 1
            if below < 0:
                break
            total += self._of_program(self.lengths[below], least)
            tokens -= self.lengths[below]
        return min(best, total) if not tokens else best

    def _of_program(self, tokens: int, least: float) -> float:
        """Of the shortest that holds them."""
        padded = self.lengths[bisect.bisect_left(self.lengths, tokens)]
        return max(padded, least) + BESIDE * self.least


def sizes_of(max_batch_tokens: int, max_rows: int) -> tuple[Size, ...]:
    """Of the programs, the shortest first: lengths by powers of two up to the budget of a batch, and of each length 1,
    4, 16, ... rows, and as many as the budget holds. With 1 and the most alone, two prompts of 128 tokens ran as 16."""
    powers = itertools.takewhile(lambda n: n < max_batch_tokens, (SHORTEST * 2**i for i in itertools.count()))
    found = []
    for tokens in (*powers, max_batch_tokens):
        most = min(max_rows, max_batch_tokens // tokens)
        found += [(rows, tokens) for rows in FEW if rows < most] + [(most, tokens)]
    return tuple(found)


def dealt(lengths: Sequence[int], sizes: tuple[Size, ...], platform: str) -> list[tuple[Size, int]]:
    """(program, how many chunks) of chunks with so many tokens each, in their order, in which a later one may share the
    pages of one before it. Chunks of one padded length that follow each other go together where that is less work."""
    padded = (min(tokens for _, tokens in sizes if tokens >= length) for length in lengths)
    found: list[tuple[Size, int]] = []
    for tokens, run in itertools.groupby(padded):
        rows = tuple(size[0] for size in sizes if size[1] == tokens)
        found += [
            ((most, tokens), count)
            for most, count in _shared_out(sum(1 for _ in run), rows, tokens, WHILE_WEIGHTS_ARE_READ[platform])
        ]
    return found


@functools.lru_cache(4096)
def _shared_out(count: int, rows: tuple[int, ...], tokens: int, least: int) -> tuple[tuple[int, int], ...]:
    """(rows of a program, chunks in it) for `count` chunks, with the least work; of equal work with fewest programs."""
    best: list[tuple[float, int, int]] = [(0, 0, 0)]  # work, programs, rows of the last one: of so many chunks
    for number in range(1, count + 1):
        ways = []
        for most in rows:
            work, programs, _ = best[number - min(most, number)]
            ways.append((work + max(most * tokens, least), programs + 1, most))
        best.append(min(ways))
    found = []
    while count:
        most = best[count][2]
        found.append((most, min(most, count)))
        count -= min(most, count)
    return tuple(found)
