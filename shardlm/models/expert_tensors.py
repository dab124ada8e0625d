"""Checkpoints whose experts of a layer are in two tensors, where a family's names have one for each: as Qwen 3 VL was
published, and as transformers writes Qwen 3.5 and others since its version 5."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored

TOGETHER = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")


@dataclasses.dataclass(frozen=True)
class Turned:
    """Some results of a matrix [inputs, results], as any checkpoint has them: [results, inputs]."""

    of: Stored
    first: int
    results: int

    @property
    def dtype(self) -> np.dtype:
        return self.of.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.results, self.of.shape[0]

    @property
    def nbytes(self) -> int:
        return self.results * self.of.shape[0] * self.dtype.itemsize

    def read(self, index) -> np.ndarray:
        """A slice of it."""
        rows, columns = (slice(None), slice(None)) if index is ... else index
        start, stop, step = rows.indices(self.results)
        return self.of.read((columns, slice(self.first + start, self.first + stop, step))).T


def one_by_one(text: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's tensors with one for each expert; `text` are its language model's options. What is in few bits
    stays as it is. Raises ShardlmError where dimensions do not tell which is which."""
    if text.get("model_type") in ("hy_v4", "lara_mini", "mistral4"):  # whose names are of two
        return dict(tensors)
    inputs, width = text.get("hidden_size"), text.get("moe_intermediate_size")
    found = {}
    for name, stored in tensors.items():
        together = TOGETHER.match(name)
        if not (together and width and isinstance(stored, Stored) and len(stored.shape) == 3):
            found[name] = stored
            continue
        if stored.shape[1] == stored.shape[2]:
            raise ShardlmError(
                f"{name} is {list(stored.shape)}: whether its matrices have results or inputs first cannot be told; "
                "write a tensor for each expert (gate_proj, up_proj and down_proj)"
            )
        gated = together[2] == "gate_up_proj"
        parts, made_of = (("gate_proj", "up_proj"), inputs) if gated else (("down_proj",), width)
        for expert, matrix in enumerate(_matrices(stored)):
            for part, one in zip(parts, _parts(matrix, len(parts), made_of), strict=True):
                found[f"{together[1]}.{expert}.{part}.weight"] = one
    return found


def _matrices(stored: Stored) -> Iterator[Stored]:
    """Those of each expert, of a tensor [experts, ...]."""
    yield from map(stored.row, range(stored.shape[0]))


def _parts(matrix: Stored, count: int, inputs: int) -> Iterator[Stored | Turned]:
    """So many matrices [results, inputs] of one that has their results one after the other."""
    rows, columns = matrix.shape
    for part in range(count):
        if rows == inputs:
            yield Turned(matrix, part * columns // count, columns // count)
        else:
            yield matrix.rows(part * rows // count, (part + 1) * rows // count)
