"""MXFP4 as GPT-OSS publishes it: all experts in one tensor of 4-bit floats, with an exponent for each 32 of them.
A slice is read without the rest."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import FP4, full
from shardlm.hf_quantised.kept import Kept
from shardlm.hf_quantised.parts import misfit, missing

GROUP = 32  # numbers that share a scale
CHUNK = 1 << 15  # groups unpacked at once, which bounds the temporaries


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """Two 4-bit numbers a byte, [E, O, I / 32, 16], with an exponent for each 32, uint8 [E, O, I / 32]; read as
    [E, I, O], the order that the same weights have in 16 bits."""

    blocks: Stored
    scales: Stored

    dtype = np.dtype("float32")
    kept = Kept("fp4", GROUP, "bfloat16", zeros=False)

    @property
    def shape(self) -> tuple[int, ...]:
        E, O, G, _ = self.blocks.shape
        return E, G * GROUP, O

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.scales.nbytes

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        return self._each(index, _unpacked, self.blocks, self.scales)

    def codes(self, index: tuple[slice, ...]) -> np.ndarray:
        """Of 4 bits, one a byte."""
        return self._each(index, lambda a: np.stack([a & 15, a >> 4], axis=-1).view(np.int8), self.blocks)

    def factors_of(self, index: tuple[slice, ...], every: int) -> np.ndarray:
        """The factors of so many inputs each, [E, I / every, O]: of parts of a group."""
        parts = GROUP // every
        return self._each(
            index, lambda exponents: np.repeat(_factors(exponents), parts, axis=-1), self.scales, of=parts
        )

    def _each(
        self, index: tuple[slice, ...], make: Callable[..., np.ndarray], *stored: Stored, of: int = GROUP
    ) -> np.ndarray:
        """What is made of whole groups, [E, O, `of` each], for what is asked for, [E, I, O] or fewer of I."""
        experts, inner, outer = full(index, 3)
        start, stop, step = inner.indices(self.shape[1] * of // GROUP)
        groups = slice(start // of, -(-stop // of))
        made = make(*(one.read((experts, outer, groups)) for one in stored))
        first = groups.start * of
        whole = made.reshape(*made.shape[:2], -1)
        return whole[..., start - first : stop - first : step].swapaxes(1, 2)


def _factors(exponents: np.ndarray) -> np.ndarray:
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)


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


def check(options: Mapping[str, Any]) -> None:
    """All of them are alike."""


def read(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by the names that they have in 16 bits."""
    found = {}
    for name, stored in tensors.items():
        of_scales = name.endswith("_scales")
        plain = name.removesuffix("_scales" if of_scales else "_blocks")
        other = plain + ("_blocks" if of_scales else "_scales")
        beside = tensors.get(other)
        if beside is None and (of_scales or name != plain):
            raise missing(stored, name, other)
        if beside is None:
            found[name] = stored
        elif not of_scales:
            found[plain] = _mxfp4(plain, stored, beside)
    return found


def _mxfp4(name: str, blocks: Stored, scales: Stored) -> Mxfp4:
    whole = len(blocks.shape) == 4 and blocks.shape == (*scales.shape, GROUP // 2)
    if not whole or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        expected = f"uint8 [E, O, G, {GROUP // 2}] and [E, O, G]"
        raise misfit(f"{name}_blocks", blocks, f"{name}_scales", scales, expected)
    return Mxfp4(blocks, scales)
