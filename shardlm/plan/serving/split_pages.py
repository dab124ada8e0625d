"""What pages take whose positions are split over devices (ops/split_pages.py): of few tokens a row queries go to all
devices, and results back; of chunks what pages hold comes whole to each, unless they attend to what is at hand."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.ops.split_pages import FEW_TOKENS, gathered_positions
from shardlm.plan.serving.paged_parts import PagedHeads
from shardlm.rules import Rules

LSE_BYTES = 4


class Sent(NamedTuple):
    """In a layer: kind as in links.py, bytes that one device sends."""

    kind: str
    nbytes: float


@dataclasses.dataclass(frozen=True)
class Split:
    """Of one layer.

    ways        devices over which positions are split
    heads       of queries that one device has
    every       what attends where the queries of all devices are
    pools       of pages: keys and values, or latents alone
    position    bytes of what all devices together hold of a position
    itemsize    of an activation
    window      positions that a token sees, 0: all
    """

    ways: int
    heads: int
    every: PagedHeads
    pools: int
    position: float
    itemsize: int
    window: int = 0

    @classmethod
    def of(cls, attention, rules: Rules, cache_bytes: float, itemsize: int) -> "Split | None":
        """None where positions are whole. `cache_bytes`: what a device holds of a position."""
        ways = rules.mesh.size(*axes_of(rules))
        if ways == 1 or not isinstance(attention, AttentionConfig | MlaConfig):
            return None
        every = PagedHeads.of(attention, itemsize, rules.mesh.size(*rules.use.axes("heads")), ways)
        pools = 1 if every.latents else 2
        return cls(ways, every.heads // ways, every, pools, cache_bytes * ways, itemsize, attention.window)

    def sent(self, tokens: float, rows: float, seen: float) -> Iterator[Sent]:
        """Of so many tokens in all rows, each of which sees `seen` positions in pages."""
        if tokens / rows > FEW_TOKENS:
            positions, _ = self._gathered(tokens / rows, rows, seen)
            yield Sent("all-gather", (self.ways - 1) / self.ways * rows * positions * self.position)
            return
        share = (self.ways - 1) * tokens * self.heads
        yield Sent("all-gather", share * self.every.query * self.itemsize)
        yield Sent("all-to-all", share * (self.every.result * self.itemsize + LSE_BYTES))

    def held(self, rows: int, each: int, longest: int) -> float:
        """Bytes that attention holds at once, of rows of so many tokens of texts up to `longest`. Of few: all heads'
        queries, their results and the parts that a row's keys are attended to in; of chunks: own queries, results so
        far in float32, and the larger of a block with its results and a block that is put together as it comes."""
        query, result = self.every.query, self.every.result
        if each <= FEW_TOKENS:
            attending = self.every.held(rows, each, longest // self.ways)
            exchanged = 2 * rows * each * self.every.heads * (result * self.itemsize + LSE_BYTES)
            return max(attending, exchanged)
        numbers = rows * each * self.heads
        first, more = gathered_positions(each, rows, math.ceil(self.position), self.ways)
        longest = min(longest, each + self.window) if self.window else longest
        block = rows * self.position * min(longest, more if longest > first else first)
        moment = max(numbers * result * self.itemsize + block, block * (1 + 1 / self.pools))
        return numbers * (query * self.itemsize + 4 * result) + moment + block / self.ways

    def _gathered(self, each: float, rows: float, seen: float) -> tuple[float, int]:
        """(positions of each row that come to a device, in how many blocks), where rows have `each` tokens."""
        first, more = gathered_positions(math.ceil(each), math.ceil(rows), math.ceil(self.position), self.ways)
        if self.window:  # the first token sees as much before the chunk, and no page before that is gathered
            seen = min(seen + each, self.window + each)
            first = min(first, self.window + each)
        blocks = max(0, math.ceil((seen - first) / more))
        return first + blocks * more, 1 + blocks


def axes_of(rules: Rules) -> tuple[str, ...]:
    """Over which positions are split."""
    return rules.act.axes("slots")


def whole_bytes(rules: Rules, each: float, cache_bytes: float) -> float:
    """Of one position, as a device reads it that keeps `cache_bytes`: with more than few tokens a row, all of it."""
    return cache_bytes if each <= FEW_TOKENS else cache_bytes * rules.mesh.size(*axes_of(rules))
