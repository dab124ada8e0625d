"""Slices of the arrays of a checkpoint, read and written without the rest, which Orbax has not: it holds whole arrays,
and of a stack of layers that is most of a model. Knows how Orbax lays arrays out, and nothing of steps or states:

    OCDBT (https://google.github.io/tensorstore/kvstore/ocdbt) holds for each array, by its dotted name, Zarr 3
    (https://zarr-specs.readthedocs.io/en/latest/v3/core/): zarr.json, and chunks c/0/0/.. of one block of bytes each
    with the sharding codec's index behind it: where in the chunk the block begins, and its bytes, uint64 both.
"""

import functools
import itertools
import math
import pathlib
from collections.abc import Iterator

import numpy as np
import tensorstore as ts

from shardlm.unread import BLOCK_BYTES, Index, Unread, blocks

CHUNK_BYTES = 32 * 2**20  # of arrays that are written here
INDEX_BYTES = 20  # of a chunk with one block: offset, size, and a checksum of both
PLAIN = [{"name": "bytes", "configuration": {"endian": "little"}}]  # as numbers lie in memory


class StoredArray:
    """An array of a checkpoint, `state` its directory of arrays."""

    def __init__(self, state: pathlib.Path, name: str):
        self._state, self._name = state, name
        self._begins: dict[str, int] = {}

    @functools.cached_property
    def _store(self) -> ts.TensorStore:
        files = {"driver": "file", "path": f"{self._state}/"}
        kvstore = {"driver": "ocdbt", "base": files, "path": f"{self._name}/"}
        return ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()

    @functools.cached_property
    def _chunk(self) -> tuple[int, ...]:
        """The shape of a chunk whose bytes lie as numbers do in memory; () where they lie otherwise."""
        told = self._store.spec().to_json()["metadata"]
        grid, codecs = told["chunk_grid"]["configuration"]["chunk_shape"], told["codecs"]
        inner = codecs[0]["configuration"]
        plain = codecs[0]["name"] == "sharding_indexed" and len(codecs) == 1 and inner["chunk_shape"] == grid
        return tuple(grid) if plain and inner["codecs"] == PLAIN else ()

    def read(self, index: Index) -> np.ndarray:
        """A slice, in the dtype of the file. Of chunks that are not plain, as compressed ones, all is read."""
        if not self._chunk:
            return self._store[index].read().result()
        out = np.empty([i.stop - i.start for i in index], self._store.dtype.numpy_dtype)
        touched = [range(i.start // n, -(-i.stop // n)) for i, n in zip(index, self._chunk, strict=True)]
        for chunk in itertools.product(*touched):
            first = [c * n for c, n in zip(chunk, self._chunk, strict=True)]
            last = [f + n for f, n in zip(first, self._chunk, strict=True)]
            cut = [slice(max(i.start, f), min(i.stop, e)) for i, f, e in zip(index, first, last, strict=True)]
            inside = tuple(slice(c.start - f, c.stop - f) for c, f in zip(cut, first, strict=True))
            place = tuple(slice(c.start - i.start, c.stop - i.start) for c, i in zip(cut, index, strict=True))
            out[place] = self._rows("c/" + "/".join(map(str, chunk)), inside)
        return out

    def _rows(self, key: str, inside: Index) -> np.ndarray:
        """A slice of a chunk: of its bytes those are read that lie between the first and the last row."""
        lead = next((i for i, cut in enumerate(inside) if cut.stop - cut.start > 1), len(inside) - 1)
        behind = self._chunk[lead + 1 :]
        row, before = math.prod(behind), 0
        for cut, n in zip(inside[: lead + 1], self._chunk, strict=False):
            before = before * n + cut.start
        count, dtype = (inside[lead].stop - inside[lead].start) * row, self._store.dtype.numpy_dtype
        begin = self._begin(key) + before * row * dtype.itemsize
        found = np.frombuffer(self._bytes(key, slice(begin, begin + count * dtype.itemsize)), dtype)
        return found.reshape(*[1] * lead, -1, *behind)[(..., *inside[lead + 1 :])]

    def _begin(self, key: str) -> int:
        """Where the block of a chunk begins."""
        if key not in self._begins:
            begin, size = np.frombuffer(self._bytes(key, slice(-INDEX_BYTES, None))[:16], "<u8")
            whole = math.prod(self._chunk) * self._store.dtype.numpy_dtype.itemsize
            if size != whole:
                raise ValueError(f"{self._name}/{key} has {size} bytes instead of {whole}")
            self._begins[key] = int(begin)
        return self._begins[key]

    def _bytes(self, key: str, some: slice) -> bytes:
        found = self._store.kvstore.read(key, byte_range=some).result()
        if found.state != "value":
            raise ValueError(f"{self._name}/{key} is missing")
        return found.value

    def grow(self, a: Unread) -> Iterator[int]:
        """Writes an array whose `first_chunk` is there; yields the bytes of each part."""
        if self._store.shape != a.shape:
            self._store = self._store.resize(exclusive_max=a.shape).result()
        written, waits = [], 0
        for index in _chunks(a):
            if any(cut.start for cut in index):
                written.append(self._store[index].write(a.fetch(index)))
            waits += math.prod(cut.stop - cut.start for cut in index) * a.dtype.itemsize
            if waits >= BLOCK_BYTES:
                _settle(written)
                yield waits
                written, waits = [], 0
        _settle(written)
        yield waits


def _settle(written: list[ts.WriteFutures]) -> None:
    for future in written:
        future.result()


def first_chunk(a: Unread) -> np.ndarray:
    """What Orbax is given to write of an array that `StoredArray.grow` writes: its chunks are of this shape then."""
    return a.fetch(next(_chunks(a)))


def _chunks(a: Unread) -> Iterator[Index]:
    return blocks(a.shape, CHUNK_BYTES // a.dtype.itemsize)
