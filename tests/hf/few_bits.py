"""Checkpoints in few bits for tests: written as files, and held against what they stand for."""

import json
import shutil

import numpy as np

from shardlm.hf_files import Folder, Planned, write_folder
from shardlm.hf_quantised import dequantised


def written(path, config, arrays) -> Folder:
    shutil.rmtree(path, ignore_errors=True)
    write_folder(path, [Planned(name, a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()], config)
    return Folder.open(path)


def opened(path, options, **arrays):
    """What is read of these tensors of module w, by their names with __ for a dot and ____ for themselves."""
    tensors = {f"w.{name.replace('____', '@').replace('__', '.').replace('@', '__')}": a for name, a in arrays.items()}
    folder = written(path, {"quantization_config": options}, tensors)
    return dequantised(folder.tensors, folder.config)


def check(found, expected) -> None:
    """Whole, and in slices, also of no rows, that begin within words and blocks."""
    O, I = expected.shape
    assert found.shape == expected.shape and found.dtype == expected.dtype == np.float32 and found.nbytes > 0
    assert np.array_equal(found.read(...), expected, equal_nan=True)
    rows = (slice(None), slice(1, O - 1), slice(O // 3, O, 3), slice(2, 2))
    columns = (slice(None), slice(3, I - 1), slice(I // 2, I), slice(I // 3, I - 2, 5))
    for part in ((r, c) for r in rows for c in columns):
        assert np.array_equal(found.read(part), expected[part], equal_nan=True), part


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [A, B] side by side in words of 32 bits along the columns, the lowest bits first, a code at a time; zeros
    fill up the last word."""
    per = 32 // bits
    words = np.zeros((len(codes), -(-codes.shape[1] // per)), np.uint32)
    for column in range(codes.shape[1]):
        words[:, column // per] |= codes[:, column].astype(np.uint32) << np.uint32(bits * (column % per))
    return words.view(np.int32)


def as_bytes(told: dict) -> np.ndarray:
    return np.frombuffer(json.dumps(told).encode(), np.uint8)
