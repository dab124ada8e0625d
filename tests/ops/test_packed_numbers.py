"""Numbers made two at a time: what is written in PTX for GPUs, here carried out by a small machine, and what is written
beside it in jax, against the numbers that they stand for."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from shardlm.ops import packed_numbers
from shardlm.ops.packed_numbers import MADE, MINUS, TIMES, byte_of

BYTES = np.arange(256, dtype=np.uint8)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
NUMBERS = {
    "int8": [BYTES.view(np.int8)],
    "fp8": [np.where(np.isnan(E4M3), np.where(BYTES >= 128, -480, 480), E4M3)],
    "int4": [((BYTES & 15) ^ 8).astype(int) - 8, ((BYTES >> 4) ^ 8).astype(int) - 8],
    "fp4": [np.where(code & 8, -1, 1) * E2M1[code & 7] for code in (BYTES & 15, BYTES >> 4)],
}


def carried_out(ptx: str, *inputs: np.ndarray) -> np.ndarray:
    """What PTX leaves in $0, of inputs uint32 in $1, $2: the instructions that packed_numbers.py uses, as NVIDIA's PTX
    ISA 8.8 has them (sections 9.7.8, logic and shifts; 9.7.9, prmt; 9.7.4, fma)."""
    held = {f"${i + 1}": a for i, a in enumerate(inputs)}
    ptx = re.sub(r"//.*", "", ptx).strip("{ }\n")
    for line in filter(None, map(str.strip, ptx.split(";"))):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        target, *sources = (word.strip() for word in rest.split(","))
        a, *others = (held[s] if s in held else np.uint32(int(s, 0)) for s in sources)
        held[target] = INSTRUCTIONS[name](a, *others)
    return held["$0"]


def _lop3(a, b, c, table):
    """Each bit by the one of the table that 4 a + 2 b + c counts."""
    places = [i for i in range(8) if int(table) >> i & 1]
    chosen = lambda word, one: word if one else ~word  # noqa: E731
    found = [chosen(a, i & 4) & chosen(b, i & 2) & chosen(c, i & 1) for i in places]
    return np.bitwise_or.reduce(found)


def _prmt(a, b, select):
    both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
    picked = [(both >> np.uint64(8 * (int(select) >> 4 * i & 7))) & np.uint64(255) for i in range(4)]
    assert not int(select) & 0x8888  # which would spread signs
    return sum(byte << np.uint64(8 * i) for i, byte in enumerate(picked)).astype(np.uint32)


def _fma(a, b, c):
    a, b, c = (np.broadcast_to(one, np.shape(a)).astype(np.uint32) for one in (a, b, c))
    a, b, c = (one.reshape(-1).view(ml_dtypes.bfloat16).astype(np.float64) for one in (a, b, c))
    return (a * b + c).astype(ml_dtypes.bfloat16).view(np.uint32)


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "fma.rn.bf16x2": _fma,
}


def two(numbers: np.ndarray) -> np.ndarray:
    """Of 16 bits as a register holds two of them, the first in the lower half."""
    return np.ascontiguousarray(numbers).view(np.uint32)


@pytest.mark.parametrize("how", MADE)
def test_each_byte_is_its_numbers(how):
    rng = np.random.default_rng(0)
    order = rng.permutation(256)  # so that neighbours in a register differ in all bits
    bits = (BYTES.astype(np.uint16) * 0x101)[order]
    plain = packed_numbers.numbers(jnp.asarray(bits.view(np.int16)), how, compiled=False)
    for made, found, expected in zip(MADE[how], plain, NUMBERS[how], strict=True):
        ptx = carried_out(packed_numbers.whole(made.ptx), two(bits)).view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(ptx.astype(np.float32), expected[order])
        np.testing.assert_array_equal(np.asarray(found, np.float32), expected[order])


@pytest.mark.parametrize("element", [np.int8, np.int16, np.int32])
def test_the_bytes_of_an_element(element):
    words = np.random.default_rng(0).integers(0, 256, 64, dtype=np.uint8).view(element)
    expected = words.view(np.uint8).reshape(len(words), -1).astype(np.uint16) * 0x101
    found = packed_numbers.bytes_of(jnp.asarray(words), compiled=False)
    np.testing.assert_array_equal(np.stack([np.asarray(one) for one in found], axis=1).view(np.uint16), expected)
    registers = [words.view(np.uint32)[::2], words.view(np.uint32)[1::2]] if element == np.int32 else None
    registers = registers or [two(words.astype(np.int16))]
    for i, ptx in enumerate(packed_numbers.selections(np.dtype(element).itemsize)):
        np.testing.assert_array_equal(carried_out(ptx, *registers).view(np.uint16), expected[:, i])


@pytest.mark.parametrize("how", MADE)
def test_a_byte_that_is_not_moved_is_its_numbers(how):
    """Whatever the other byte of the element is."""
    words = np.random.default_rng(0).permutation(2**16).astype(np.uint16)
    still = packed_numbers.COPY[how]
    byte = (words >> (8 * still)) & 255
    found = packed_numbers.bytes_of(jnp.asarray(words.view(np.int16)), False, how)
    np.testing.assert_array_equal(np.asarray(found[still]).view(np.uint16), words)
    np.testing.assert_array_equal(
        np.asarray(found[1 - still]).view(np.uint16), ((words >> (8 - 8 * still)) & 255) * 257
    )
    plain = packed_numbers.numbers(found[still], how, compiled=False)
    for made, one, expected in zip(MADE[how], plain, NUMBERS[how], strict=True):
        ptx = carried_out(packed_numbers.whole(made.ptx), two(words)).view(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(ptx.astype(np.float32), expected[byte])
        np.testing.assert_array_equal(np.asarray(one, np.float32), expected[byte])


@pytest.mark.parametrize(("what", "result"), [(MINUS, np.subtract), (TIMES, np.multiply)])
def test_results_are_rounded_once(what, result):
    a, b = np.random.default_rng(0).normal(size=(2, 64)).astype(ml_dtypes.bfloat16)
    ptx = carried_out(packed_numbers.of_two(*what), two(a), two(b)).view(ml_dtypes.bfloat16)
    expected = result(a.astype(np.float64), b.astype(np.float64)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(ptx.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("how", ["int8", "fp8"])
def test_bytes_are_the_nearest_numbers(how):
    """Of all that bfloat16 has up to 448 or 127, of what lies halfway between two, and of more than there is."""
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    most, kind = (127, np.int8) if how == "int8" else (448, ml_dtypes.float8_e4m3fn)
    x = every[np.abs(every) <= most]
    between = np.sort(np.unique(NUMBERS[how][0][np.abs(NUMBERS[how][0].astype(np.float32)) <= most].astype(np.float32)))
    x = np.concatenate([x, (between[1:] + between[:-1]) / 2])
    wanted = (np.rint(x) if how == "int8" else x).astype(kind).view(np.uint8)
    np.testing.assert_array_equal(byte_of(jnp.asarray(x), how), wanted)
    if how == "fp8":
        np.testing.assert_array_equal(byte_of(jnp.float32([460, -1e9, np.inf]), how), [0x7E, 0xFE, 0x7E])
