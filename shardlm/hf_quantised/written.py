"""Matrices in few bits as compressed-tensors has them in its files, and what config.json says of them: the inverse of
compressed.py, for the schemes that are written. How numbers are rounded is the caller's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from shardlm.hf_files import Planned

WEIGHT = ".weight"
Round = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Of a matrix float32 [O, I] its numbers, of 4 bits in int8, and its scales [O, groups]."""
_BYTES = {"int8": np.dtype("int8"), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}


def written(tensors: Iterable[Planned], numbers: str, group: int, round_: Round) -> Iterator[Planned]:
    """The tensors with those that are to be rounded in `numbers`, "fp8", "int8" or "int4": in groups packed into words,
    else a number a byte with a scale for each result."""
    for one in tensors:
        if not one.rounds:
            yield one
        elif group:
            yield from _packed(one, 4 if numbers == "int4" else 8, group, round_)
        else:
            yield from _by_result(one, _BYTES[numbers], round_)


def _by_result(one: Planned, dtype: np.dtype, round_: Round) -> Iterator[Planned]:
    both, (O, _) = _Both(one, round_), one.shape
    yield Planned(one.name, dtype, one.shape, both.numbers)
    yield Planned(f"{one.name}_scale", np.dtype("float32"), (O, 1), both.scale)


def _packed(one: Planned, bits: int, group: int, round_: Round) -> Iterator[Planned]:
    both, (O, I), each = _Both(one, round_), one.shape, 32 // bits
    yield Planned(f"{one.name}_packed", np.dtype("int32"), (O, -(-I // each)), lambda: in_words(both.numbers(), bits))
    yield Planned(f"{one.name}_scale", np.dtype(ml_dtypes.bfloat16), (O, I // group), both.scale)
    yield Planned(f"{one.name}_shape", np.dtype("int64"), (2,), lambda: np.array(one.shape, np.int64))


class _Both:
    """Numbers and scales of a matrix that is made once: whoever asks for the numbers leaves the scales."""

    def __init__(self, one: Planned, round_: Round):
        self._one, self._round, self._scale = one, round_, None

    def numbers(self) -> np.ndarray:
        found, self._scale = self._round(self._one.make())
        return found

    def scale(self) -> np.ndarray:
        if self._scale is None:
            self.numbers()
        scale, self._scale = self._scale, None
        return scale


def in_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Whole numbers int8 [O, I] as codes half their range larger, side by side in words of 32 bits, int32, the lowest
    bits first; the last word of a row may be in part of zeros."""
    each = 32 // bits
    codes = (numbers.view(np.uint8) + np.uint8(1 << (bits - 1))) & np.uint8((1 << bits) - 1)
    codes = np.pad(codes, ((0, 0), (0, -numbers.shape[1] % each)))
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(codes).view("<i4")


def options(numbers: str, group: int, dynamic: bool, ignore: Sequence[str]) -> dict[str, Any]:
    """quantization_config of config.json. dynamic: whether activations are rounded too, each token by a scale of its
    own; `ignore`: what is left as it is, by the names of modules and by patterns."""
    kind, bits = ("float" if numbers == "fp8" else "int"), (4 if numbers == "int4" else 8)
    form = "pack-quantized" if group else f"{kind}-quantized"
    plain = {"num_bits": bits, "type": kind, "symmetric": True, "block_structure": None, "actorder": None}
    plain |= {"observer_kwargs": {}}
    weights = {"strategy": "group" if group else "channel", "group_size": group or None, "dynamic": False}
    token = {"strategy": "token", "group_size": None, "dynamic": True, "observer": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**plain, **weights, "observer": "minmax"},
                "input_activations": {**plain, **token} if dynamic else None,
                "output_activations": None,
                "format": form,
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
