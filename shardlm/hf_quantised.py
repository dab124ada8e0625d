"""Tensors that published checkpoints hold in 8 or 4 bits with scales beside them, read as the numbers they stand for. A
slice is read without the rest. Knows numbers and names, no architectures."""

import dataclasses
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

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        numbers = self.numbers.read(index).astype(np.float32)
        if index is Ellipsis:
            index = (slice(None),) * 2
        rows, columns = (np.arange(n)[part] // b for n, part, b in zip(self.shape, index, self.size, strict=True))
        return numbers * self.factors.read(...)[np.ix_(rows, columns)]


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

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        experts, inner, outer = (slice(None),) * 3 if index is Ellipsis else index
        start, stop, step = inner.indices(self.shape[1])
        groups = slice(start // GROUP, -(-stop // GROUP))
        packed = self.blocks.read((experts, outer, groups))
        numbers = FP4[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*packed.shape[:3], GROUP)
        exponents = self.scales.read((experts, outer, groups)).astype(np.int32) - 127
        whole = np.ldexp(numbers, exponents[..., None]).reshape(*packed.shape[:2], -1)
        first = groups.start * GROUP
        return whole[..., start - first : stop - first : step].swapaxes(1, 2)


def supported(config: Mapping[str, Any]) -> str:
    """ "fp8", "mxfp4" or "", by the checkpoint's `quantization_config`. Raises ShardlmError for another method."""
    quantised = config.get("quantization_config")
    if not quantised:
        return ""
    method = quantised.get("quant_method")
    if method not in ("fp8", "mxfp4") or (method == "fp8" and not quantised.get("weight_block_size")):
        raise ShardlmError(
            f"config.json has quantization_config={dict(quantised)!r}; supported are quant_method fp8 with a "
            "weight_block_size, and mxfp4. Open a checkpoint in 16 bits instead"
        )
    return method


def dequantised(tensors: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors by the names that they have in 16 bits. Raises ShardlmError for numbers without their scales."""
    method = supported(config)
    if not method:
        return dict(tensors)
    numbers, scales = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}[method]
    found = {}
    for name, stored in tensors.items():
        if name.endswith(scales):
            continue
        plain = name.removesuffix(numbers)
        beside = tensors.get(plain + scales)
        if beside is None and (name != plain or stored.dtype.name.startswith("float8")):
            raise ShardlmError(f"{stored.file}: {name} is there, and {plain + scales} is not")
        if beside is None:
            found[name] = stored
        elif method == "fp8":
            found[plain] = BlockFp8(stored, beside, tuple(config["quantization_config"]["weight_block_size"]))
        else:
            found[plain] = Mxfp4(stored, beside)
    return found
