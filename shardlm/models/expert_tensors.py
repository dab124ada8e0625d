"""Checkpoints whose experts of a layer are in two tensors, where a family's names have one for each: as Qwen 3 VL was
published, and as transformers writes Qwen 3.5 and others since its version 5. Read one by one, and written together."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Planned, Stored

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


def together(tensors: Iterable[Planned], shapes: Mapping[str, Sequence[int]]) -> Iterator[Planned]:
    """Tensors of one for each expert with those in two that a checkpoint has so, whose tensors have these shapes; the
    inverse of `one_by_one`."""
    planned, in_two = {one.name: one for one in tensors}, {}
    for name, shape in shapes.items():
        found = TOGETHER.match(name)
        parts = ("gate_proj", "up_proj") if found and found[2] == "gate_up_proj" else ("down_proj",)
        if found and len(shape) == 3 and f"{found[1]}.0.{parts[0]}.weight" in planned:
            own = [[planned.pop(f"{found[1]}.{e}.{part}.weight") for part in parts] for e in range(shape[0])]
            in_two[name] = _in_two(name, own, shape)
    yield from planned.values()
    yield from in_two.values()


def _in_two(name: str, experts: Sequence[Sequence[Planned]], shape: Sequence[int]) -> Planned:
    """Of each expert its parts, [results, inputs], one after the other; turned where the shape says so."""
    results = sum(one.shape[0] for one in experts[0])
    turned, dtype = shape[1] != results, experts[0][0].dtype

    def make() -> np.ndarray:
        out = np.empty(shape, dtype)
        for place, parts in zip(out, experts, strict=True):
            rows = np.concatenate([one.make() for one in parts])
            place[...] = rows.T if turned else rows
        return out

    return Planned(name, dtype, tuple(shape), make)


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
