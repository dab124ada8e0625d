"""Which programs read chunks of prompts: how many rows and tokens they have, and how the chunks of a batch are dealt to
them. No jax."""

import functools
import itertools
from collections.abc import Sequence

# A program of fewer tokens takes as long as reading the weights: so many multiply a bfloat16 weight while an H100 loads
# it (989 TFLOP/s, 3.35 TB/s: 295 tokens). On two cores one token of 768 x 12 layers takes 12 ms, and a chunk of 256 as
# long as 14 of these (measured, CPU time): 19 tokens.
WHILE_WEIGHTS_ARE_READ = {"cpu": 32, "gpu": 256}
SHORTEST = 32  # tokens of a row
FEW = tuple(4**i for i in range(12))  # rows of programs that the budget of a batch has more room for

Size = tuple[int, int]  # rows, tokens of each


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
