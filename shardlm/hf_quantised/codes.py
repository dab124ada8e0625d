"""Codes of few bits as published checkpoints pack them into words, and what each of them stands for. A slice is read
without the rest."""

import dataclasses
import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from shardlm.hf_files import Stored

# The sixteen values of a 4-bit float with two exponent bits and one of mantissa
# (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 5.3.3).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])

Index = tuple[slice, slice]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Codes, uint8 [A, B], of `bits` bits, side by side in words along dimension `dim`, the lowest bits first.

    size   codes along that dimension, of which the last word may hold fewer
    order  of each code of a word, which one of its bits it is; (): one after the other
    added  to each word before its bits are looked at, carries included
    """

    words: Stored
    bits: int
    dim: int
    size: int
    order: tuple[int, ...] = ()
    added: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        A, B = self.words.shape
        return (self.size, B) if self.dim == 0 else (A, self.size)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def per_word(self) -> int:
        return per_word(self.words, self.bits)

    def read(self, index: Index) -> np.ndarray:
        start, stop, step = index[self.dim].indices(self.size)
        first, last = start // self.per_word, -(-stop // self.per_word)
        of_words = [*index]
        of_words[self.dim] = slice(first, last)
        words = self.words.read(tuple(of_words))
        if self.added:
            words += np.asarray(self.added, words.dtype)
        codes = self._along_rows(words) if self.dim == 0 else self._along_columns(words)
        cut = slice(start - first * self.per_word, stop - first * self.per_word, step)
        return codes[cut] if self.dim == 0 else codes[:, cut]

    def _along_rows(self, words: np.ndarray) -> np.ndarray:
        codes = np.empty((len(words), self.per_word, words.shape[1]), np.uint8)
        for i, place in enumerate(self.order or range(self.per_word)):
            codes[:, i] = (words >> (self.bits * place)) & ((1 << self.bits) - 1)
        return codes.reshape(len(words) * self.per_word, words.shape[1])

    def _along_columns(self, words: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(words).view(np.uint8)
        codes = np.empty((*flat.shape, 8 // self.bits), np.uint8)  # a byte holds whole codes
        for i in range(codes.shape[2]):
            np.bitwise_and(flat >> (self.bits * i), (1 << self.bits) - 1, out=codes[..., i])
        if self.order:
            codes = codes.reshape(*words.shape, self.per_word)[..., self.order]
        return codes.reshape(len(words), words.shape[1] * self.per_word)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Codes of 8 bits, [A, B], one a byte."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def read(self, index: Index) -> np.ndarray:
        return self.stored.read(index).view(np.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class Numbers:
    """Codes and what they stand for: values, float32 [256], or whole numbers, each `less` than its code. `kind` as
    Kept has it."""

    codes: Packed | Bytes
    values: np.ndarray | None = None
    less: int = 0
    kind: str = ""

    @property
    def middle(self) -> int:
        """What whole numbers are less by as they are held, so that as many lie on either side of 0."""
        return 0 if self.values is not None else (1 << self.codes.bits - 1) - self.less

    def kept(self, codes: np.ndarray) -> np.ndarray:
        """Codes as they are held: 8-bit numbers in their dtype, others in int8."""
        if self.values is None:
            return (codes - np.uint8(self.less + self.middle)).view(np.int8)
        return codes.view(self.codes.stored.dtype if isinstance(self.codes, Bytes) else np.int8)

    def put(self, codes: np.ndarray, out: np.ndarray) -> None:
        """What these stand for, into float32 of the same shape."""
        if self.values is not None:
            np.take(self.values, codes, out=out, mode="clip")
        else:  # a tenth of the time (measured)
            out[...] = codes
            out -= self.less

    def read(self, index: Index) -> np.ndarray:
        codes = self.codes.read(index)
        out = np.empty(codes.shape, np.float32)
        self.put(codes, out)
        return out


def floats(stored: Stored) -> Numbers:
    """8-bit floats or integers, as their dtype says."""
    kind = {"int8": "int8", "float8_e4m3fn": "fp8"}.get(stored.dtype.name, "")
    return Numbers(Bytes(stored), np.arange(256, dtype=np.uint8).view(stored.dtype).astype(np.float32), kind=kind)


def whole(codes: Packed, less: int = 0) -> Numbers:
    """Whole numbers, each `less` than its code."""
    return Numbers(codes, less=less, kind="int8" if codes.bits == 8 else "int4")


def fp4(stored: Stored) -> Numbers:
    """4-bit floats, two a byte along the columns, uint8 [A, B / 2]."""
    return Numbers(Packed(stored, 4, 1, 2 * stored.shape[1]), np.resize(FP4, 256), kind="fp4")


def per_word(words: Stored, bits: int) -> int:
    """How many codes a word has room for."""
    return 8 * words.dtype.itemsize // bits


def fits(words: Stored, bits: int, dim: int, size: int) -> bool:
    """Whether there are as many words as so many codes need."""
    return words.shape[dim] == -(-size // per_word(words, bits))


def full(index, dims: int = 2) -> tuple[slice, ...]:
    """A slice of each dimension; that of a whole array is ..."""
    return (slice(None),) * dims if index is Ellipsis else tuple(index)


def float32(stored: Stored, shape: Sequence[int] = ()) -> np.ndarray:
    """A small tensor whole, of that shape where one is given; bytes that hold a float's exponent alone (E8M0, section
    5.4.1 of the specification above) as what they stand for."""
    a = stored.read(...)
    a = a.view(ml_dtypes.float8_e8m0fnu) if a.dtype == np.uint8 else a
    a = a.astype(np.float32)
    return a.reshape(shape) if shape else a


def one(shape: Sequence[int]) -> bool:
    """Whether an array of this shape holds a single number."""
    return math.prod(shape) == 1
