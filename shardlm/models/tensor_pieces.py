"""Tensors that checkpoints have in pieces, one after the other along their first dimension: tables of n-grams
(Qwen4-Exp), norms of streams (EAGLE 3.1)."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored

PIECE = re.compile(r"(.*\.ngram_embedding(?=\.shard)|(?:.*\.)?fc_norm(?=\.\d))\.(?:shard_)?(\d+)\.weight$")


@dataclasses.dataclass(frozen=True)
class Joined:
    """One tensor of several [rows, ...], of which those are read that have the rows asked for."""

    pieces: tuple[Stored, ...]

    @property
    def dtype(self) -> np.dtype:
        return self.pieces[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def read(self, index) -> np.ndarray:
        """A slice of it, of rows that follow each other."""
        rows, *rest = (slice(None),) * len(self.shape) if index is ... else index
        first, last, step = rows.indices(self.shape[0])
        assert step == 1, "tables are read by runs of rows"
        found, begin = [], 0
        for piece in self.pieces:
            own = slice(max(0, first - begin), min(piece.shape[0], last - begin))
            if own.start < own.stop:
                found.append(piece.read((own, *rest)))
            begin += piece.shape[0]
        return np.concatenate(found) if len(found) != 1 else found[0]


def joined(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors, with one for the pieces of each. Raises ShardlmError where pieces lack or do not go
    together."""
    pieces: dict[str, dict[int, Any]] = {}
    found = {}
    for name, stored in tensors.items():
        if piece := PIECE.match(name):
            pieces.setdefault(f"{piece[1]}.weight", {})[int(piece[2])] = stored
        else:
            found[name] = stored
    for name, own in pieces.items():
        if sorted(own) != list(range(len(own))):
            lacking = next(i for i in range(len(own)) if i not in own)
            raise ShardlmError(f"{name} is in {len(own)} pieces, of which shard_{lacking} is missing; fetch it again")
        if len({(stored.dtype, *stored.shape[1:]) for stored in own.values()}) > 1:
            raise ShardlmError(f"{name}: its pieces differ in dtype or width; fetch them again")
        found[name] = Joined(tuple(own[i] for i in range(len(own))))
    return found


def cuts(rows: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(number, first row, one past the last) of each piece, as torch.chunk cuts them."""
    each = -(-rows // count)
    yield from ((i, first, min(first + each, rows)) for i, first in enumerate(range(0, rows, each)))


def check_told(told: Mapping[str, Sequence[int]], tensors: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose tensors of options are not what its config.json says."""
    for name, numbers in told.items():
        held = tensors[name].read(...) if name in tensors else None
        if held is not None and held.tolist() != list(numbers):
            raise ShardlmError(
                f"{name} is {held.tolist()}, and by the options of config.json it is {list(numbers)}: rows of n-grams "
                "would be others; mend vocab_size, seed, ngram_vocab_size_base, heads_per_ngram or ple_layer_ids"
            )
