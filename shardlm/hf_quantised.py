"""Tensors that published checkpoints hold in 8 or 4 bits with scales beside them, read as the numbers they stand for. A
slice is read without the rest. Knows numbers and names, no architectures."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored

# The sixteen values of a 4-bit float with two exponent bits and one of mantissa
# (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf, section 5.3.3).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4 = np.concatenate([FP4, -FP4])
GROUP = 32  # numbers that share a scale
CHUNK = 1 << 15  # groups unpacked at once, which bounds the temporaries


@dataclasses.dataclass(frozen=True)
class BlockFp8:
    """e4m3 [O, I] with a float32 factor for each block of `size` (DeepSeek V3, https://arxiv.org/abs/2412.19437,
    section 3.3.2)."""

    numbers: Stored
    factors: Stored
    size: tuple[int, int]

    dtype = np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.factors.nbytes

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        numbers = self.numbers.read(index)
        if index is Ellipsis:
            index = (slice(None),) * 2
        rows, columns = (np.arange(n)[part] // b for n, part, b in zip(self.shape, index, self.size, strict=True))
        factors = self.factors.read(...).astype(np.float32)[:, columns]
        values = np.arange(256, dtype=np.uint8).view(numbers.dtype).astype(np.float32)
        out = np.empty(numbers.shape, np.float32)
        for band in np.unique(rows):
            own = slice(*np.searchsorted(rows, (band, band + 1)))
            np.multiply(values[numbers[own].view(np.uint8)], factors[band], out=out[own])
        return out


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Two 4-bit numbers a byte, [E, O, I / 32, 16], with an exponent for each 32, uint8 [E, O, I / 32]; read as
    [E, I, O], the order that the same weights have in 16 bits."""

    blocks: Stored
    scales: Stored

    dtype = np.dtype("float32")

    @property
    def shape(self) -> tuple[int, ...]:
        E, O, G, _ = self.blocks.shape
        return E, G * GROUP, O

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        experts, inner, outer = (slice(None),) * 3 if index is Ellipsis else index
        start, stop, step = inner.indices(self.shape[1])
        groups = slice(start // GROUP, -(-stop // GROUP))
        packed, exponents = (stored.read((experts, outer, groups)) for stored in (self.blocks, self.scales))
        whole = _unpacked(packed, exponents).reshape(*packed.shape[:2], -1)
        first = groups.start * GROUP
        return whole[..., start - first : stop - first : step].swapaxes(1, 2)


def _unpacked(packed: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """[..., G, 16] bytes and [..., G] exponents as float32 [..., G, 32]."""
    flat, scales = packed.reshape(-1, GROUP // 2), exponents.reshape(-1, 1)
    pairs = np.empty(flat.shape, np.uint64)
    for first in range(0, len(flat), CHUNK):
        some = slice(first, first + CHUNK)
        np.take(_pairs(), scales[some].astype(np.intp) << 8 | flat[some], out=pairs[some], mode="clip")
    return pairs.view(np.float32).reshape(*exponents.shape, GROUP)


@functools.cache
def _pairs() -> np.ndarray:
    """[65536]: at exponent * 256 + byte, the byte's two numbers side by side in 64 bits, for one look-up each byte."""
    codes = np.arange(256)
    pairs = FP4[np.stack([codes & 15, codes >> 4], axis=-1)]
    with np.errstate(over="ignore"):
        return np.ldexp(pairs, (codes - 127)[:, None, None]).reshape(-1).view(np.uint64)


def supported(config: Mapping[str, Any]) -> str:
    """ "fp8", "mxfp4" or "", by the checkpoint's `quantization_config`. Raises ShardlmError for another method."""
    quantised = config.get("quantization_config")
    if not quantised:
        return ""
    method, size = quantised.get("quant_method"), quantised.get("weight_block_size")
    in_blocks = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if method not in ("fp8", "mxfp4") or (method == "fp8" and not in_blocks):
        raise ShardlmError(
            f"config.json has quantization_config={dict(quantised)!r}; supported are quant_method fp8 with a "
            "weight_block_size of two numbers, and mxfp4. Open a checkpoint in 16 bits instead"
        )
    return method


def dequantised(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names that they have in 16 bits. Raises ShardlmError for numbers and scales that are without
    each other or do not fit."""
    method = supported(config)
    if not method:
        return dict(tensors)
    numbers, scales = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}[method]
    found = {}
    for name, stored in tensors.items():
        of_scales = name.endswith(scales)
        plain = name.removesuffix(scales if of_scales else numbers)
        other = plain + (numbers if of_scales else scales)
        beside = tensors.get(other)
        if beside is None and (of_scales or name != plain or stored.dtype.name.startswith("float8")):
            raise ShardlmError(f"{stored.file}: {name} is there, and {other} is not; download the checkpoint again")
        if beside is None:
            found[name] = stored
        elif not of_scales and method == "fp8":
            found[plain] = _block_fp8(name, stored, beside, tuple(config["quantization_config"]["weight_block_size"]))
        elif not of_scales:
            found[plain] = _mxfp4(plain, stored, beside)
    return found


def _block_fp8(name: str, numbers: Stored, factors: Stored, size: tuple[int, int]) -> BlockFp8:
    needed = tuple(-(-n // b) for n, b in zip(numbers.shape, size, strict=False))
    kinds = numbers.dtype.name, factors.dtype.name
    if len(numbers.shape) != 2 or not kinds[0].startswith("float8") or "float" not in kinds[1]:
        raise _misfit(name, numbers, f"{name}_scale_inv", factors, "8-bit floats [O, I] and floats")
    if factors.shape != needed:
        raise _misfit(name, numbers, f"{name}_scale_inv", factors, f"a factor for each block of {size}: {needed}")
    return BlockFp8(numbers, factors, size)


def _mxfp4(name: str, blocks: Stored, scales: Stored) -> Mxfp4:
    whole = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, GROUP // 2)
    if not whole or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        expected = f"uint8 [E, O, G, {GROUP // 2}] and [E, O, G]"
        raise _misfit(f"{name}_blocks", blocks, f"{name}_scales", scales, expected)
    return Mxfp4(blocks, scales)


def _misfit(name: str, numbers: Stored, other: str, scales: Stored, expected: str) -> ShardlmError:
    return ShardlmError(
        f"{numbers.file}: {name} is {numbers.dtype}{list(numbers.shape)} and {other} is {scales.dtype}"
        f"{list(scales.shape)}; needed are {expected}. Download the checkpoint again, or open one in 16 bits"
    )
