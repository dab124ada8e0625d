"""Weights of GGUF files by the names that they have in Hugging Face's form. A slice is read without the rest, as the
numbers that it stands for or as it is."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardlm.errors import ShardlmError
from shardlm.gguf_files import shards
from shardlm.gguf_files.header import BLOCKS, Block
from shardlm.gguf_files.keys import Place, places
from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import full
from shardlm.hf_quantised.gguf_kinds import KINDS, codes_of, factors_of, numbers, zeros_of
from shardlm.hf_quantised.kept import Kept

CHUNK = 1 << 18  # numbers made at once, which bounds the temporaries
PLAIN = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": ml_dtypes.bfloat16}
PLAIN |= {f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)}
Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """A tensor of blocks, [*, rows, inputs], of which `size` rows are in turn those of two halves, 0: in order."""

    block: Block
    size: int = 0

    dtype = np.dtype("float32")
    few = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def nbytes(self) -> int:
        return self.block.nbytes

    @property
    def kept(self) -> Kept | None:
        kind = KINDS.get(self.block.kind)
        return kind.kept if kind and len(self.shape) > 1 else None

    def read(self, index: Index) -> np.ndarray:
        return self._each(index, functools.partial(numbers, self.block.kind), np.float32)

    def codes(self, index: Index) -> np.ndarray:
        """Numbers as they are, of 4 bits in int8."""
        return self._each(index, functools.partial(codes_of, self.block.kind), np.int8)

    def factors_of(self, index: Index, every: int) -> np.ndarray:
        """The factors of so many inputs each, [*, rows, inputs / every]: of parts of a group."""
        return self._of_groups(factors_of, index, every)

    def zeros_of(self, index: Index, every: int) -> np.ndarray:
        """Their zeros."""
        return self._of_groups(zeros_of, index, every)

    def _of_groups(self, make: Callable[[str, np.ndarray], np.ndarray], index: Index, every: int) -> np.ndarray:
        parts = KINDS[self.block.kind].group // every
        return self._each(index, lambda blocks: make(self.block.kind, blocks).repeat(parts, axis=1), np.float32, every)

    def _each(self, index: Index, make: Callable[[np.ndarray], np.ndarray], dtype: Any, every: int = 1) -> np.ndarray:
        """What is made of whole blocks, for what is asked for; the last of `index` counts `every` inputs as one."""
        *outer, inner = full(index, len(self.shape))
        a_block = BLOCKS[self.block.kind][0] // every
        start, stop, step = inner.indices(self.shape[-1] // every)
        first, last = start // a_block, max(start // a_block, -(-stop // a_block))
        raw = self._raw(tuple(outer))[..., first:last, :]
        lead, each = raw.shape[:-2], max(1, CHUNK // max(1, (last - first) * a_block * every))
        rows = raw.reshape(math.prod(lead), *raw.shape[-2:]) if len(lead) != 1 else raw
        out = np.empty((len(rows), len(range(start, stop, step))), dtype)
        cut = slice(start - first * a_block, stop - first * a_block, step)
        for one in range(0, len(rows), each):
            some = np.ascontiguousarray(rows[one : one + each])
            made = make(some.reshape(-1, some.shape[-1])).reshape(len(some), (last - first) * a_block)
            out[one : one + each] = made[:, cut]
        return out.reshape(*lead, out.shape[-1])

    def _raw(self, outer: Index) -> np.ndarray:
        whole = self.block.raw()
        return whole[outer] if not self.size else whole[(_order(outer[0], self.shape[0], self.size), *outer[1:])]


def _order(part: slice, rows: int, size: int) -> np.ndarray:
    """Which of their rows ours are: those of each head's first half are the even ones."""
    ours = np.arange(rows)[part]
    head, row = ours // size, ours % size
    return head * size + row % (size // 2) * 2 + row // (size // 2)


@dataclasses.dataclass(frozen=True, eq=False)
class InHeads:
    """A tensor of plain numbers whose rows are as those of `Blocks`."""

    stored: Stored
    size: int

    few = False

    @property
    def dtype(self) -> np.dtype:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def read(self, index: Index) -> np.ndarray:
        """Whole heads are read, and their rows ordered."""
        rows, *rest = full(index, len(self.shape))
        order = _order(rows, self.shape[0], self.size)
        if not len(order):
            return self.stored.read((slice(0, 0), *rest))
        first = int(order.min())
        return self.stored.read((slice(first, int(order.max()) + 1), *rest))[order - first]


Source = Stored | Blocks | InHeads


Fetch = Callable[[Source, Index], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A tensor made of one or two, of which as much is read as is needed.

    make    its slice, by what fetches one of a part
    inside  whether it is [E, inputs, *], as their [E, *, inputs] are, so that it may be held as it is
    """

    parts: tuple[Source, ...]
    shape: tuple[int, ...]
    make: Callable[[Index, Fetch], np.ndarray]
    inside: bool = False

    dtype = np.dtype("float32")

    @property
    def few(self) -> bool:
        return any(isinstance(part, Blocks) for part in self.parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def kept(self) -> Kept | None:
        found = {part.kept if isinstance(part, Blocks) else None for part in self.parts}
        return found.pop() if self.inside and len(found) == 1 else None

    def read(self, index: Index) -> np.ndarray:
        return self.make(full(index, len(self.shape)), lambda part, own: part.read(own).astype(np.float32, copy=False))

    def codes(self, index: Index) -> np.ndarray:
        return self.make(full(index, len(self.shape)), lambda part, own: part.codes(own))

    def factors_of(self, index: Index, every: int) -> np.ndarray:
        return self.make(full(index, len(self.shape)), lambda part, own: part.factors_of(own, every))

    def zeros_of(self, index: Index, every: int) -> np.ndarray:
        return self.make(full(index, len(self.shape)), lambda part, own: part.zeros_of(own, every))


def check(options: Mapping[str, Any]) -> None:
    """Raises ShardlmError where it is not said which file holds the weights."""
    if not isinstance(options.get("file"), str):
        raise ShardlmError(
            "config.json has a quantization_config with quant_method='gguf' and no file; open the .gguf file itself"
        )


def read(tensors: Mapping[str, Block], options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by their names in Hugging Face's form."""
    found = places(shards.read(pathlib.Path(options["file"])))
    return {name: _opened(name, place) for name, place in found.items()}


def _opened(name: str, place: Place) -> Any:
    """Raises ShardlmError for tensors whose shapes do not go together."""
    form, blocks, size = place
    one = _source(blocks[0], size)
    if form in ("plain", "heads"):
        return one
    if form == "less_one":
        return Made((one,), one.shape, lambda index, fetch: fetch(one, index) - 1)
    if form == "turned":
        shape = (*one.shape[:-2], one.shape[-1], one.shape[-2]) if len(one.shape) > 1 else ()
        return Made((one,), _known(name, shape, one), functools.partial(_turned, one), inside=len(shape) == 3)
    two = _source(blocks[1])
    return _gate_up(name, one, two) if form == "gate_up" else _kv_b(name, one, two)


def _source(block: Block, size: int = 0) -> Source:
    if block.kind not in PLAIN:
        return Blocks(block, size)
    stored = Stored(block.file, np.dtype(PLAIN[block.kind]), block.shape, block.begin)
    return InHeads(stored, size) if size else stored


def _known(name: str, shape: tuple[int, ...], *parts: Source) -> tuple[int, ...]:
    if not shape:
        held = " and ".join(str(list(part.shape)) for part in parts)
        raise ShardlmError(
            f"{_file(parts[0])}: what {name} is made of has the shape {held}, which llama.cpp's converter does not "
            "write; convert the model anew"
        )
    return shape


def _file(part: Source) -> pathlib.Path:
    return part.block.file if isinstance(part, Blocks) else part.stored.file if isinstance(part, InHeads) else part.file


def _turned(part: Source, index: Index, fetch: Fetch) -> np.ndarray:
    """With the last two dimensions exchanged."""
    *outer, a, b = index
    return fetch(part, (*outer, b, a)).swapaxes(-1, -2)


def _gate_up(name: str, gate: Source, up: Source) -> Made:
    """[E, F, D] twice as [E, D, 2 F], or [E, F] twice as [E, 2 F]: columns are of the first and the second in turn."""
    alike = gate.shape == up.shape and len(gate.shape) in (2, 3)
    E, F, *D = gate.shape if alike else (0, 0)
    shape = _known(name, (E, *D, 2 * F) if alike else (), gate, up)

    def make(index: Index, fetch: Fetch) -> np.ndarray:
        experts, *inputs, columns = index
        wanted, found = np.arange(2 * F)[columns], []
        for half, part in enumerate((gate, up)):
            mine = wanted % 2 == half
            rows = wanted[mine] // 2
            step = int(rows[1] - rows[0]) if len(rows) > 1 else 1
            span = slice(int(rows[0]), int(rows[-1]) + 1, step) if len(rows) else slice(0, 0)
            read = fetch(part, (experts, span, *inputs))
            found.append((mine, read.swapaxes(-1, -2) if inputs else read))
        (_, first), _ = found
        out = np.empty((*first.shape[:-1], len(wanted)), first.dtype)
        for mine, read in found:
            out[..., mine] = read
        return out

    return Made((gate, up), shape, make, inside=bool(D))


def _kv_b(name: str, keys: Source, values: Source) -> Made:
    """[H, R, K] and [H, V, R] as [H (K + V), R]."""
    fit = len(keys.shape) == len(values.shape) == 3 and keys.shape[:2] == values.shape[::2]
    H, R, K = keys.shape if fit else (0, 0, 0)
    V = values.shape[1] if fit else 0
    shape = _known(name, (H * (K + V), R) if fit else (), keys, values)

    def make(index: Index, fetch: Fetch) -> np.ndarray:
        rows, columns = index
        wanted = np.arange(H * (K + V))[rows]
        if not len(wanted):
            return np.empty((0, len(range(R)[columns])), np.float32)
        first = int(wanted.min()) // (K + V)
        some = slice(first, int(wanted.max()) // (K + V) + 1)
        of_keys = fetch(keys, (some, columns, slice(None))).swapaxes(1, 2)
        of_values = fetch(values, (some, slice(None), columns))
        whole = np.concatenate([of_keys, of_values], axis=1).reshape(-1, of_values.shape[2])
        return whole[wanted - first * (K + V)]

    return Made((keys, values), shape, make)
