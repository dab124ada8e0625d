"""Several sources of rows in one stream, each with its share of the tokens: which source and which of its rows comes
when, told from the place in the stream alone. What is in a row is `packing`'s, the order within a source `loader`'s.
"""

import bisect
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import grain
import numpy as np

from shardlm.data.config import Packing
from shardlm.data.packing import Batch, make_rows
from shardlm.data.shards import ShownImage, TokenShards
from shardlm.errors import ShardlmError

_PARTS = 1 << 32  # of which each source has a whole number: weights are met within 2**-32


class Drawn(NamedTuple):
    """Of a source over a run: its tokens, its share of those that are trained on, and how often it is gone through."""

    name: str
    num_tokens: int
    share: float
    epochs: float


class MixedRows:
    """The rows of each source, one source after the other, as one of packing.py's. A row is of one source.

    Attributes:
      parts: of 2**32 or so rows of the stream, those of each source: in proportion to its weight, and less of rows
        that hold more tokens.
    """

    def __init__(
        self,
        sources: Mapping[str, TokenShards],
        weights: Sequence[float],
        seq_len: int,
        packing: Packing,
        axes: bool = False,
    ):
        """Raises ShardlmError for a source without rows, and as `make_rows`."""
        self._names, self._shards = tuple(sources), tuple(sources.values())
        self._rows = [make_rows(shards, seq_len, packing, axes) for shards in self._shards]
        filled = [1 - rows.padding_fraction for rows in self._rows]
        if empty := [name for name, share in zip(sources, filled, strict=True) if not share]:
            raise ShardlmError(f"{', '.join(empty)} of data.train has no token to learn: leave it and its weight out")
        self._shares = [weight / sum(weights) for weight in weights]
        often = [share / full for share, full in zip(self._shares, filled, strict=True)]
        self.parts = tuple(max(1, round(_PARTS * one / sum(often))) for one in often)
        self.padding_fraction = 1 - float(np.average(filled, weights=self.parts))
        self._begins = [0, *itertools.accumulate(map(len, self._rows))]
        self._tokens = [0, *itertools.accumulate(shards.num_tokens for shards in self._shards)]
        self._files = [0, *itertools.accumulate(shards.num_shards for shards in self._shards)]

    def __len__(self) -> int:
        return self._begins[-1]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The first row of each source, and the first behind it."""
        return list(itertools.pairwise(self._begins))

    def read(self, indices: Sequence[int]) -> Batch:
        """Rows by their index: {name: [len(indices), ...]}."""
        batch: Batch = {}
        for source, places in self._by_source(indices):
            for name, found in self._rows[source].read([indices[i] - self._begins[source] for i in places]).items():
                rows = batch.setdefault(name, np.empty((len(indices), *found.shape[1:]), found.dtype))
                rows[places] = found
        return batch

    def images(self, indices: Sequence[int]) -> Iterator[tuple[int, int, ShownImage]]:
        """(place in `indices`, place of its first token in that row, image) of each in these rows, in order; images are
        those of all sources' shards in one stream."""
        found = []
        for source, places in self._by_source(indices):
            tokens, files, own = self._tokens[source], self._files[source], self._rows[source]
            for row, place, one in own.images([indices[i] - self._begins[source] for i in places]):
                moved = one._replace(shard=files + one.shard, first=tokens + one.first, end=tokens + one.end)
                found.append((places[row], place, moved))
        return iter(sorted(found, key=lambda image: image[:2]))

    def _by_source(self, indices: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """(source, places in `indices` that are its rows) of those that have some."""
        of = [bisect.bisect_right(self._begins, index) - 1 for index in indices]
        return ((source, [i for i, one in enumerate(of) if one == source]) for source in sorted(set(of)))

    def drawn(self, rows: int) -> list[Drawn]:
        """What the first so many rows of the stream take of each source."""
        counts = counted(rows, self.parts)
        each = zip(self._names, self._shards, self._shares, counts, self._rows, strict=True)
        return [Drawn(name, shards.num_tokens, share, n / len(own)) for name, shards, share, n, own in each]


def counted(rows: int, parts: Sequence[int]) -> list[int]:
    """How many of the first so many rows of the stream are of each source: its share, within one row for each source
    before it. No count falls where `rows` grows."""
    counts, left = [], sum(parts)
    for part in parts[:-1]:
        rest = rows * (left - part) // left
        counts.append(rows - rest)
        rows, left = rest, left - part
    return [*counts, rows]


class Mixed(grain.MapDataset):
    """Element i is row i of the stream. The parents give the order of each source's rows, without end.

    Whose turn it is would repeat itself, and some devices, or replicas that seldom meet, would have one source alone:
    with a seed the rows of each batch change places.
    """

    def __init__(self, orders: Sequence[grain.MapDataset], parts: Sequence[int], global_batch: int, seed: int | None):
        super().__init__(orders)
        self._parts, self._batch, self._seed = tuple(parts), global_batch, seed

    def __len__(self) -> int:
        return min(map(len, self._parents))

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        if self._seed is not None:
            batch, row = divmod(index, self._batch)
            index = batch * self._batch + _places(self._seed, batch, self._batch)[row]
        before, after = counted(index, self._parts), counted(index + 1, self._parts)
        source = next(i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
        return self._parents[source][before[source]]


@functools.lru_cache(16)  # batches are read one after the other, by a few threads
def _places(seed: int, batch: int, rows: int) -> list[int]:
    return np.random.default_rng([seed, batch]).permutation(rows).tolist()
