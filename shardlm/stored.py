"""Tensors that lie in files, of which a part is read without the rest. Knows bytes, no formats and no architectures."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from shardlm.errors import ShardlmError

DTYPES = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor in a file, its first number at byte `begin`. `strides`: how many numbers on the next place of each
    dimension is; None: the last dimension's follow each other, and so on."""

    file: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind its last number."""
        if self.strides is None or not self.nbytes:
            return self.begin + self.nbytes
        return self.begin + (1 + furthest(self.shape, self.strides)) * self.dtype.itemsize

    def rows(self, first: int, stop: int) -> "Stored":
        """Some places of its first dimension, as a tensor of their own."""
        each = math.prod(self.shape[1:]) if self.strides is None else self.strides[0]
        begin = self.begin + first * each * self.dtype.itemsize
        return dataclasses.replace(self, shape=(stop - first, *self.shape[1:]), begin=begin)

    def row(self, place: int) -> "Stored":
        """One of them, without that dimension."""
        one, strides = self.rows(place, place + 1), self.strides and self.strides[1:]
        return dataclasses.replace(one, shape=self.shape[1:], strides=strides)

    def laid(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> "Stored":
        """The same bytes as another array. Raises ShardlmError where its numbers do not follow each other."""
        if self.strides is not None:
            raise ShardlmError(
                f"{self.file} holds a tensor {list(self.shape)} with strides {list(self.strides)}, which is read "
                "packed, as it lies: save it with .contiguous(), or as safetensors"
            )
        return dataclasses.replace(self, shape=shape, dtype=dtype or self.dtype)

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A slice as an array of its own; of the file only its pages are touched.

        Raises ShardlmError where the file is gone or has become shorter: its map would end the process.
        """
        size = self.file.stat().st_size if self.file.exists() else 0
        if size < self.end:
            raise ShardlmError(
                f"{self.file} has become shorter since it was opened: a tensor ends at byte {self.end} and the file "
                f"has {size} bytes; download it again and start anew"
            )
        if not self.nbytes:
            return np.empty(self.shape, self.dtype)[index]
        if self.strides is None:
            whole = np.memmap(self.file, self.dtype, "r", self.begin, self.shape or (1,))
        else:
            count = (self.end - self.begin) // self.dtype.itemsize
            flat = np.memmap(self.file, self.dtype, "r", self.begin, (count,))
            each = [stride * self.dtype.itemsize for stride in self.strides]
            whole = np.lib.stride_tricks.as_strided(flat, self.shape, each, writeable=False)
        return np.array(whole[index] if self.shape else whole[0])


def furthest(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many numbers behind its first one a tensor's last one is."""
    return sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def read_json(file: pathlib.Path, why: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        raise ShardlmError(f"{file} is not there; {why}") from None
    except OSError as error:
        raise unreadable(file, error) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ShardlmError(f"{file} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ShardlmError(f"{file} holds a JSON {type(found).__name__} and not an object; download it again")
    return found


def unreadable(file: pathlib.Path, error: OSError) -> ShardlmError:
    return ShardlmError(f"cannot read {file}: {error.strerror}; check what it is and its permissions")
