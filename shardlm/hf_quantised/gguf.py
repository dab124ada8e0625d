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
from shardlm.gguf_files.forms import Order, Place
from shardlm.gguf_files.header import BLOCKS, Block
from shardlm.gguf_files.keys import places
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
    """A tensor of blocks, [*, rows, inputs], whose rows are in another order where there is one."""

    block: Block
    order: Order | None = None

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
        return (
            whole[outer] if not self.order else whole[(self.order.theirs(_some(outer[0], self.shape[0])), *outer[1:])]
        )


def _some(part: slice, size: int) -> np.ndarray:
    return np.arange(size)[part]


def _picked(wanted: np.ndarray, fetch: Callable[[slice], np.ndarray], axis: int = 0) -> np.ndarray:
    """Those of a dimension in any order: all between the first and the last are fetched."""
    if not len(wanted):
        return fetch(slice(0, 0))
    first = int(wanted.min())
    return fetch(slice(first, int(wanted.max()) + 1)).take(wanted - first, axis)


@dataclasses.dataclass(frozen=True, eq=False)
class Ordered:
    """A tensor of plain numbers whose rows are as those of `Blocks`."""

    stored: Stored
    order: Order

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
        rows, *rest = full(index, len(self.shape))
        return _picked(self.order.theirs(_some(rows, self.shape[0])), lambda some: self.stored.read((some, *rest)))


Source = Stored | Blocks | Ordered


Fetch = Callable[[Source, Index], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Made:
    """A tensor made of one or two, of which as much is read as is needed.

    make    its slice, by what fetches one of a part
    inside  whether it has groups of inputs as they are in the file, so that it may be held as it is
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


@dataclasses.dataclass(frozen=True, eq=False)
class InColumns:
    """A matrix whose columns, its inputs, are in another order."""

    part: Stored | Blocks
    order: Order

    dtype = np.dtype("float32")

    @property
    def few(self) -> bool:
        return isinstance(self.part, Blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    @property
    def nbytes(self) -> int:
        return self.part.nbytes

    @property
    def kept(self) -> Kept | None:
        """As it is held, if groups of inputs stay together."""
        found = self.part.kept if isinstance(self.part, Blocks) else None
        return found if found and found.group and self.order.each % found.group == 0 else None

    def read(self, index: Index) -> np.ndarray:
        return self._each(index, self.part.read).astype(np.float32, copy=False)

    def codes(self, index: Index) -> np.ndarray:
        return self._each(index, self.part.codes)

    def factors_of(self, index: Index, every: int) -> np.ndarray:
        return self._each(index, lambda own: self.part.factors_of(own, every), every)

    def zeros_of(self, index: Index, every: int) -> np.ndarray:
        return self._each(index, lambda own: self.part.zeros_of(own, every), every)

    def _each(self, index: Index, fetch: Callable[[Index], np.ndarray], every: int = 1) -> np.ndarray:
        rows, columns = full(index, 2)
        wanted = self.order.counted_by(every).theirs(_some(columns, self.shape[1] // every))
        return _picked(wanted, lambda some: fetch((rows, some)), axis=1)


def check(options: Mapping[str, Any]) -> None:
    """Raises ShardlmError where it is not said which file holds the weights."""
    if not isinstance(options.get("file"), str):
        raise ShardlmError(
            "config.json has a quantization_config with quant_method='gguf' and no file; open the .gguf file itself"
        )


def in_full(file: pathlib.Path) -> bool:
    """Whether none of its weights are in few bits."""
    return all(block.kind in PLAIN for block in shards.read(file).tensors.values())


def read(tensors: Mapping[str, Block], options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by their names in Hugging Face's form."""
    found = places(shards.read(pathlib.Path(options["file"])))
    return {name: _opened(name, place) for name, place in found.items()}


def _opened(name: str, place: Place) -> Any:
    """Raises ShardlmError for tensors whose shapes do not go together."""
    form, blocks, order, groups = place
    if form == "columns" and order:
        return InColumns(_source(blocks[0]), order)
    one = _source(blocks[0], order)
    if form in ("plain", "columns"):
        return one
    if form == "less_one":
        return Made((one,), one.shape, lambda index, fetch: fetch(one, index) - 1)
    if form == "rate":
        return Made((one,), one.shape, lambda index, fetch: np.log(-fetch(one, index)))
    if form == "turned":
        shape = (*one.shape[:-2], one.shape[-1], one.shape[-2]) if len(one.shape) > 1 else ()
        return Made((one,), _known(name, shape, one), functools.partial(_turned, one), inside=len(shape) == 3)
    two = _source(blocks[1])
    if form == "by_groups":
        return _by_groups(name, one, two, *groups)
    return {"gate_up": _gate_up, "kv_b": _kv_b, "stacked": _stacked}[form](name, one, two)


def _source(block: Block, order: Order | None = None) -> Source:
    if block.kind not in PLAIN:
        return Blocks(block, order)
    stored = Stored(block.file, np.dtype(PLAIN[block.kind]), block.shape, block.begin)
    return Ordered(stored, order) if order else stored


def _known(name: str, shape: tuple[int, ...], *parts: Source) -> tuple[int, ...]:
    if not shape:
        held = " and ".join(str(list(part.shape)) for part in parts)
        raise ShardlmError(
            f"{_file(parts[0])}: what {name} is made of has the shape {held}, which llama.cpp's converter does not "
            "write; convert the model anew"
        )
    return shape


def _file(part: Source) -> pathlib.Path:
    return part.block.file if isinstance(part, Blocks) else part.stored.file if isinstance(part, Ordered) else part.file


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


def _stacked(name: str, gate: Source, up: Source) -> Made:
    """[E, F, D] twice as [E, 2 F, D]."""
    alike = gate.shape == up.shape and len(gate.shape) == 3
    E, F, D = gate.shape if alike else (0, 0, 0)
    shape = _known(name, (E, 2 * F, D) if alike else (), gate, up)

    def make(index: Index, fetch: Fetch) -> np.ndarray:
        experts, rows, inputs = index
        wanted = _some(rows, 2 * F)
        parts = ((gate, wanted[wanted < F]), (up, wanted[wanted >= F] - F))
        found = [_picked(own, lambda some, p=part: fetch(p, (experts, some, inputs)), 1) for part, own in parts]
        return np.concatenate(found, axis=1)

    return Made((gate, up), shape, make, inside=True)


def _by_groups(name: str, several: Source, last: Source, count: int, *sizes: int) -> Made:
    """Parts [count size, D], all but the last one after the other in one tensor, as [count (all sizes), D]."""
    fit = several.shape[1:] == last.shape[1:] and len(last.shape) == 2 and last.shape[0] == count * sizes[-1]
    fit = fit and several.shape[0] == count * sum(sizes[:-1])
    shape = _known(name, (count * sum(sizes), last.shape[1]) if fit else (), several, last)
    first = np.cumsum([0, *sizes])  # of each part, in a group

    def make(index: Index, fetch: Fetch) -> np.ndarray:
        rows, inputs = index
        group, row = np.divmod(_some(rows, shape[0]), first[-1])
        out = None
        for part, size in enumerate(sizes):
            mine = (first[part] <= row) & (row < first[part + 1])
            source, before = (last, 0) if part == len(sizes) - 1 else (several, count * first[part])
            wanted = before + group[mine] * size + row[mine] - first[part]
            found = _picked(wanted, lambda some, s=source: fetch(s, (some, inputs)))
            out = np.empty((len(row), *found.shape[1:]), found.dtype) if out is None else out
            out[mine] = found
        return out

    return Made((several, last), shape, make, inside=True)
