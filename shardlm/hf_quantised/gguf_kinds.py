"""What the bytes of llama.cpp's kinds of blocks stand for (src/ggml-quants.c and ggml-common.h of
https://github.com/ggml-org/ggml): codes, and for each group of them a factor and, in some kinds, a number taken away,
which is a zero where they are held as they are. The kinds that are looked up in tables are left to the package `gguf`,
which llama.cpp's own people keep."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_quantised.codes import FP4
from shardlm.hf_quantised.kept import Kept


class Unpacked(NamedTuple):
    """Of B blocks.

    codes    make int8 or uint8 [B, groups, numbers]
    factors  float32 [B, groups]
    less     float32 [B, groups] to be taken away, None: nothing
    """

    codes: Callable[[], np.ndarray]
    factors: np.ndarray
    less: np.ndarray | None = None


class Kind(NamedTuple):
    """unpack  of uint8 [B, bytes of a block]
    group   numbers that share a factor
    kept    how they may be held as they are
    middle  what codes are less by as they are held
    """

    unpack: Callable[[np.ndarray], Unpacked]
    group: int
    kept: Kept
    middle: int = 0


_EIGHT = np.arange(8, dtype=np.uint8)[:, None]


def _half(blocks: np.ndarray, first: int) -> np.ndarray:
    """float16 at this byte, as float32 [B, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[B, n, bytes] as [B, n, 2, bytes]: the low bits of all, then the high ones."""
    return np.stack([packed & 15, packed >> 4], axis=2)


def _twos(packed: np.ndarray) -> np.ndarray:
    """64 bytes as [B, 2, 4, 32]: of each 32 of them the lowest two bits of all, then the next two, ..."""
    return packed.reshape(-1, 2, 1, 32) >> _EIGHT[::2] & 3


def _ones(packed: np.ndarray) -> np.ndarray:
    """32 bytes as [B, 8, 32]: the lowest bits of all, then the next ones, ..."""
    return packed[:, None] >> _EIGHT & 1


def _signed(codes: np.ndarray, less: int) -> np.ndarray:
    codes -= np.uint8(less)
    return codes.view(np.int8)


def _q4_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(lambda: _signed(_nibbles(blocks[:, None, 2:]).reshape(-1, 1, 32), 8), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Unpacked:
    return Unpacked(lambda: _nibbles(blocks[:, None, 4:]).reshape(-1, 1, 32), _half(blocks, 0), -_half(blocks, 2))


def _fives(blocks: np.ndarray, first: int) -> np.ndarray:
    """[B, 1, 32]: four bytes from this one on are the highest bits of the numbers in those behind."""
    high = np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little")
    return _nibbles(blocks[:, None, first + 4 :]).reshape(-1, 1, 32) | high[:, None] << 4


def _q5_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(lambda: _signed(_fives(blocks, 2), 16), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Unpacked:
    return Unpacked(lambda: _fives(blocks, 4), _half(blocks, 0), -_half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Unpacked:
    return Unpacked(lambda: np.ascontiguousarray(blocks[:, None, 2:]).view(np.int8), _half(blocks, 0))


def _q2_k(blocks: np.ndarray) -> Unpacked:
    factors, less = _half(blocks, 80) * (blocks[:, :16] & 15), _half(blocks, 82) * (blocks[:, :16] >> 4)
    return Unpacked(lambda: _twos(blocks[:, 16:80]).reshape(-1, 16, 16), factors, less)


def _q3_k(blocks: np.ndarray) -> Unpacked:
    """Scales are 16 of six bits: their lowest four in eight bytes, the others in four."""
    low, two = blocks[:, 96:104], blocks[:, 104:108]
    scales = np.concatenate([low & 15, low >> 4], axis=1)
    scales |= np.concatenate([two >> shift & 3 for shift in (0, 2, 4, 6)], axis=1) << 4

    def codes() -> np.ndarray:
        whole = _twos(blocks[:, 32:96]).reshape(-1, 8, 32) | _ones(blocks[:, :32]) << 2
        return _signed(whole, 4).reshape(-1, 16, 16)

    return Unpacked(codes, _half(blocks, 108) * (scales.astype(np.float32) - 32))


def _with_scales(blocks: np.ndarray, codes: Callable[[], np.ndarray]) -> Unpacked:
    """Of Q4_K and Q5_K: two times eight numbers of six bits in twelve bytes: the lowest bits of the first four and of
    the next four as they are; the others' four lowest in the last four bytes, and their highest above the first."""
    scales, less, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    factor = np.concatenate([scales & 63, last & 15 | scales >> 2 & 48], axis=1)
    less = np.concatenate([less & 63, last >> 4 | less >> 2 & 48], axis=1)
    return Unpacked(codes, _half(blocks, 0) * factor, _half(blocks, 2) * less)


def _q4_k(blocks: np.ndarray) -> Unpacked:
    return _with_scales(blocks, lambda: _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: np.ndarray) -> Unpacked:
    def codes() -> np.ndarray:
        return _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | _ones(blocks[:, 16:48]) << 4

    return _with_scales(blocks, codes)


def _q6_k(blocks: np.ndarray) -> Unpacked:
    def codes() -> np.ndarray:
        low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
        return _signed(low | _twos(blocks[:, 128:192]) << 4, 32).reshape(-1, 16, 16)

    return Unpacked(codes, _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8))


def _mxfp4(blocks: np.ndarray) -> Unpacked:
    factors = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    return Unpacked(lambda: _nibbles(blocks[:, None, 1:]).reshape(-1, 1, 32).view(np.int8), factors)


def _alone(numbers: str, group: int, scale: str) -> Kept:
    return Kept(numbers, group, scale, zeros=False)


def _less(numbers: str, group: int) -> Kept:
    """With zeros: what is taken away, in factors."""
    return Kept(numbers, group, "float32", zeros=True, whole=False)


KINDS = {
    "Q4_0": Kind(_q4_0, 32, _alone("int4", 32, "float16")),
    "Q4_1": Kind(_q4_1, 32, _less("int4", 32), middle=8),
    "Q5_0": Kind(_q5_0, 32, _alone("int8", 32, "float16")),
    "Q5_1": Kind(_q5_1, 32, _less("int8", 32)),
    "Q8_0": Kind(_q8_0, 32, _alone("int8", 32, "float16")),
    "Q2_K": Kind(_q2_k, 16, _less("int4", 16)),
    "Q3_K": Kind(_q3_k, 16, _alone("int4", 16, "float32")),
    "Q4_K": Kind(_q4_k, 32, _less("int4", 32), middle=8),
    "Q5_K": Kind(_q5_k, 32, _less("int8", 32)),
    "Q6_K": Kind(_q6_k, 16, _alone("int8", 16, "float32")),
    "MXFP4": Kind(_mxfp4, 32, _alone("fp4", 32, "bfloat16")),
}
MANY = np.float32(1 << 30)  # factors of a group whose factor is 0: beside so many, codes are rounded away


def codes_of(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Codes as they are held, int8 [B, numbers]."""
    codes = KINDS[kind].unpack(blocks).codes()
    codes = codes - np.asarray(KINDS[kind].middle, codes.dtype)
    return codes.view(np.int8).reshape(len(blocks), -1)


def factors_of(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Their factors, float32 [B, groups]."""
    _, factors, less = KINDS[kind].unpack(blocks)
    return factors if less is None else np.where(factors == 0, less / MANY, factors)


def zeros_of(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Their zeros, float32 [B, groups]."""
    _, factors, less = KINDS[kind].unpack(blocks)
    if less is None:
        return np.zeros(factors.shape, np.float32)
    zeros = np.divide(less, factors, out=np.full_like(factors, MANY), where=factors != 0)
    return zeros - np.float32(KINDS[kind].middle)


def numbers(kind: str, blocks: np.ndarray) -> np.ndarray:
    """What B blocks, uint8 [B, bytes], stand for: float32 [B, numbers]. Raises ShardlmError where the package for a
    rare kind is not installed."""
    if kind not in KINDS:
        return _by_package(kind, blocks)
    codes, factors, less = KINDS[kind].unpack(blocks)
    out = FP4[codes()] if kind == "MXFP4" else codes().astype(np.float32)
    out *= factors[..., None]
    if less is not None:
        out -= less[..., None]
    return out.reshape(len(blocks), -1)


def _by_package(kind: str, blocks: np.ndarray) -> np.ndarray:
    try:
        import gguf
    except ImportError:
        raise ShardlmError(
            f"the GGUF file has tensors of the kind {kind}, which the package gguf reads; pip install 'shardlm[gguf]', "
            f"or download another quantisation of the model: {', '.join(KINDS)}, F16 and BF16 are read without it"
        ) from None
    try:
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError):
        raise ShardlmError(
            f"the GGUF file has tensors of the kind {kind}, which the installed package gguf does not read; pip "
            "install --upgrade gguf, or download another quantisation of the model"
        ) from None
