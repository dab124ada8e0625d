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

BOTH = 1.5  # the power mean of multiplying and reading weights in few bits, which hide each other in part
BESIDE = 1 / 4  # of reading the weights, a program's work beside its tokens: the host's, and that of sampling

Size = tuple[int, int]  # rows, tokens of each


@dataclasses.dataclass(frozen=True)
class FewBits:
    """Weights in few bits that a kernel multiplies as they are held, and that are made anew in 16 bits for more tokens.

    most   tokens up to which the kernel does
    block  of them, for which it reads the weights once
    held   tokens that take as long as reading them as they are held
    whole  as reading them in 16 bits
    anew   as making them so
    """

    most: float
    block: float
    held: float
    whole: float
    anew: float

    def work(self, tokens: int) -> tuple[float, float]:
        """Of a program of so many tokens, as tokens: (what reading takes beside the products, what goes before)."""
        if tokens <= self.most:
            return self.held * math.ceil(tokens / self.block), 0.0
        return self.whole, self.anew


@dataclasses.dataclass(frozen=True)
class Cuts:
    """How prompts are cut into chunks: where programs end, so that little is padded.

    lengths  of the programs, the shortest first; () where any chunk is as good as another
    least    tokens that take as long as reading the weights: WHILE_WEIGHTS_ARE_READ
    few_bits  the weights that are in few bits, where that makes a difference
    """

    lengths: tuple[int, ...] = ()
    least: int = 0
    few_bits: tuple[FewBits, ...] = ()

    @classmethod
    def of(cls, sizes: Sequence[Size], platform: str, few_bits: tuple[FewBits, ...] = ()) -> "Cuts":
        return cls(tuple(sorted({tokens for _, tokens in sizes})), WHILE_WEIGHTS_ARE_READ[platform], few_bits)

    def chunk(self, left: int, room: int, prompts: int = 1, beside: bool = False) -> int:
        """Of `left` tokens of a prompt, how many its next chunk has: as many as there is `room` for, in a program that
        holds them all, or as many as fill a shorter one, whichever makes less work with what is then left. `prompts`
        that are to be read now share the reading of the weights where there is room for them. One of 1,100 tokens is a
        program of 2,048, or one of 1,024 and one of 128: estimated for Llama 3 8B on an H100 53 ms and 33. 0 where it
        would have a program to itself for a little room `beside` chunks of others, and more of it waits for more."""
        if self.few_bits and (prompts > 1 or beside):
            return self._in_crowd.chunk(left, room, prompts, beside)
        most = min(left, room)
        if room <= 0 or (beside and room < min(left, self.least)):
            return 0
        if not self.lengths or most <= self.lengths[0]:
            return most
        below = self.lengths[bisect.bisect(self.lengths, most) - 1]
        least = self.least / max(1, min(prompts, room // most))

        def work(count: int) -> float:
            return self._of_program(count, least) + self._work(left - count, least)

        return min((most, below, *(n for n in self._as_held if n < below)), key=work)

    def _work(self, tokens: int, least: float) -> float:
        """Of so many tokens of a prompt, in as many chunks as make it least."""
        most, total = self.lengths[-1], 0.0
        if tokens > most:
            total, tokens = tokens // most * self._of_program(most, least), tokens % most
        best = math.inf
        while tokens:
            best = min(best, total + self._of_program(tokens, least))
            for held in self._as_held:
                rest = self._of_program(tokens % held, least) if tokens % held else 0.0
                best = min(best, total + tokens // held * self._of_program(held, least) + rest)
            below = bisect.bisect(self.lengths, tokens) - 1
            if below < 0:
                break
            total += self._of_program(self.lengths[below], least)
            tokens -= self.lengths[below]
        return min(best, total) if not tokens else best

    @functools.cached_property
    def _as_held(self) -> tuple[int, ...]:
        """Lengths of the longest programs that make no weights anew."""
        ends = (bisect.bisect(self.lengths, few.most) - 1 for few in self.few_bits)
        return tuple(sorted({self.lengths[end] for end in ends if end >= 0}, reverse=True))

    @functools.cached_property
    def _in_crowd(self) -> "Cuts":
        """Where weights are made anew once for many prompts, and further chunks of one wait for steps of decoding:
        with these cuts there, 8B in int4 on an H100 took 0.8 of its most requests of 1,100 + 100 tokens with a mean
        first token of 1.2 s, 0.25 without (the scheduler on random arrivals, estimated)."""
        return dataclasses.replace(self, few_bits=())

    def _of_program(self, tokens: int, least: float) -> float:
        """Of the shortest that holds them."""
        end = bisect.bisect_left(self.lengths, tokens)
        if self.few_bits:
            return self._alone[end]
        return max(self.lengths[end], least) + BESIDE * self.least

    @functools.cached_property
    def _alone(self) -> tuple[float, ...]:
        """Of each program that has one prompt alone, with weights in few bits."""
        found = []
        for length in self.lengths:
            read, anew = map(sum, zip(*(few.work(length) for few in self.few_bits), strict=True))
            found.append((length**BOTH + read**BOTH) ** (1 / BOTH) + anew + BESIDE * self.least)
        return tuple(found)


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
