"""A matrix of few bits with a factor, and where it is asymmetric a zero, for each cell of a grid: what nearly all
published formats come to. A slice is read without the rest, as the numbers that it stands for or as it is (`Kept`)."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import Numbers, float32, full
from shardlm.hf_quantised.kept import Kept

CHUNK = 1 << 18  # numbers made at once, which bounds the temporaries


@dataclasses.dataclass(frozen=True)
class Factors:
    """A factor for each cell, float32 [cells of rows, cells of columns], in whatever shape it is stored.

    common   a number that all of them are divided by, or multiplied with
    divided  whether divided
    """

    stored: Stored
    shape: tuple[int, int]
    common: Stored | None = None
    divided: bool = False

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    @property
    def dtype(self) -> str:
        """In which all of them are exact, of two bytes where it can be."""
        if self.common is not None:
            return "float32"
        two = {"bfloat16": "bfloat16", "float16": "float16"}
        two |= dict.fromkeys(("uint8", "float8_e8m0fnu"), "bfloat16")  # exponents alone
        return two.get(self.stored.dtype.name, "float32")

    def read(self) -> np.ndarray:
        found = float32(self.stored, self.shape)
        if self.common is None:
            return found
        common = float32(self.common, (1,))
        return found / common if self.divided else found * common


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """(number - zero) * factor, read as float32 [O, I].

    numbers  codes [O, I], or [I, O] where turned
    factors  of cells, in the same order of dimensions
    size     rows and columns of a cell
    zeros    one for each cell
    listed   the cell of each input, int32 [I], where they are not in order
    turned   whether it is stored as [I, O]
    times    what all is multiplied with last
    """

    numbers: Numbers
    factors: Factors
    size: tuple[int, int]
    zeros: Numbers | None = None
    listed: Stored | None = None
    turned: bool = False
    times: float = 1.0

    dtype = np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.codes.shape[:: -1 if self.turned else 1]

    @property
    def nbytes(self) -> int:
        parts = (self.numbers.codes, self.factors, self.zeros and self.zeros.codes, self.listed)
        return sum(part.nbytes for part in parts if part)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        index = full(index)[:: -1 if self.turned else 1]
        codes = self.numbers.codes.read(index)
        rows, columns = (self._cells(dim)[part] for dim, part in enumerate(index))
        factors, spread = self.factors.read(), _of_columns(columns)
        zeros = self.zeros.read(full(...)) if self.zeros else None
        out = np.empty(codes.shape, np.float32)
        each = max(1, CHUNK // max(1, codes.shape[1]))
        for first in range(0, len(codes), each):
            some = slice(first, first + each)
            part = out[some]
            self.numbers.put(codes[some], part)
            if zeros is not None:
                part -= spread(_of_rows(zeros, rows[some]))
            part *= spread(_of_rows(factors, rows[some]))
            if self.times != 1:
                part *= np.float32(self.times)
        return self._as_read(out)

    @functools.cached_property
    def kept(self) -> Kept | None:
        """How it may be held as it is, None: not; a list of cells is looked at."""
        along = 0 if self.turned else 1
        numbers, count = self.numbers.kind, self.numbers.codes.shape[along]
        in_order = np.array_equal(self._cells(along), np.arange(count) // self.size[along])
        alone = self.numbers.middle and self.zeros is None  # no zero would tell of what they are less by
        broken = self.zeros is not None and not self.zeros.kind.startswith("int")  # zeros that are no whole numbers
        if not numbers or self.times != 1 or not in_order or alone or broken:
            return None
        size = self.size[along] if self.size[along] < count else 0
        return Kept(numbers, size, self.factors.dtype, self.zeros is not None)

    def codes(self, index: tuple[slice, ...]) -> np.ndarray:
        """Numbers as they are, less what lies in the middle of whole ones; of 4-bit floats their codes."""
        found = self.numbers.codes.read(full(index)[:: -1 if self.turned else 1])
        return self._as_read(self.numbers.kept(found))

    def factors_of(self, index: tuple[slice, ...], every: int) -> np.ndarray:
        """The factors of so many inputs each, [O, I / every]: of parts of what shares one."""
        return self._of_groups(self.factors.read(), index, every)

    def zeros_of(self, index: tuple[slice, ...], every: int) -> np.ndarray:
        """Their zeros as `codes` are, int16."""
        if self.zeros is None:
            return self._of_groups(np.zeros(self.factors.shape, np.int16), index, every)
        return self._of_groups(self.zeros.read(full(...)).astype(np.int16) - self.numbers.middle, index, every)

    def _of_groups(self, cells: np.ndarray, index: tuple[slice, ...], every: int) -> np.ndarray:
        steps = (every, 1) if self.turned else (1, every)
        index = full(index)[:: -1 if self.turned else 1]
        rows, columns = (self._cells(dim)[::step][index[dim]] for dim, step in enumerate(steps))
        return self._as_read(cells[np.ix_(rows, columns)])

    def _as_read(self, a: np.ndarray) -> np.ndarray:
        return a.T if self.turned else a

    def _cells(self, dim: int) -> np.ndarray:
        """The cell of each row or column."""
        count, cells = self.numbers.codes.shape[dim], self.factors.shape[dim]
        if self.listed is not None and dim == (0 if self.turned else 1):
            found = self.listed.read(...)
            # -1 is what they are filled with before anything is listed
            # (https://github.com/vllm-project/compressed-tensors/blob/0.9.4/src/compressed_tensors/quantization/lifecycle/forward.py)
            if not (found == -1).any():
                return self._checked(found, cells)
        return np.arange(count) // self.size[dim]

    def _checked(self, listed: np.ndarray, cells: int) -> np.ndarray:
        if listed.size and (listed.min() < 0 or listed.max() >= cells):
            raise ShardlmError(
                f"{self.listed.file}: a list of groups has {listed.min()} to {listed.max()}, and there are {cells} "
                "groups; download the checkpoint again"
            )
        return listed


def _of_rows(cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """What each of these rows has; where it is one for all of them, that is left to broadcasting."""
    return cells[rows[:1]] if (rows == rows[0]).all() else cells[rows]


def _of_columns(columns: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """From cells [rows, cells] what each of these columns has; a single cell is left to broadcasting."""
    if (columns[1:] < columns[:-1]).any():
        return lambda cells: cells if cells.shape[1] == 1 else np.take(cells, columns, axis=1)
    found, counts = np.unique(columns, return_counts=True)  # repeating takes a fifth of looking up (measured)
    return lambda cells: cells if cells.shape[1] == 1 else np.repeat(cells[:, found], counts, axis=1)
