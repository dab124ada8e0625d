"""Numbers of 8 and 4 bits made in bfloat16, two at a time, inside of Pallas kernels for NVIDIA GPUs.

Reading bits is quick and making numbers of them is not: at its full rate an H100 has 9 instructions of a thread for a
byte that it reads. Triton converts one number at a time, by way of float32. Here two of them lie in one register of 32
bits as the tensor cores take them, and each is made by writing its bits into those of a bfloat16 whose value is known:
0x4300 is 128, of which the lowest bit counts 1. What is written in PTX for a GPU is written beside it in jax, operation
by operation, for the interpreter; tests hold one to the other for every byte.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

Numbers = Literal["int8", "int4", "fp8", "fp4"]
Bits = jax.Array  # int16: one byte, twice


@dataclasses.dataclass(frozen=True)
class Made:
    """One number of a byte.

    ptx   of two at once: from %bits, each byte of which is there twice, to %made; %a, %b and %c may be used
    plain the same of one, by bits int16
    """

    ptx: str
    plain: Callable[[jax.Array], jax.Array]


def _as_bf16(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def _int(value: int) -> jax.Array:
    """16 bits."""
    return jnp.int16(value - 0x10000 if value >= 0x8000 else value)


def _four(shift: int) -> Made:
    """A whole number of 4 bits: its sign turned around it counts from 8 below, and 136 is taken off."""
    ptx = f"""
        shr.u32 %a, %bits, {shift};
        lop3.b32 %a, %a, 0x000f000f, 0x43084308, 0x6a;  // (a & b) ^ c
        mov.b32 %b, 0x3f803f80;
        mov.b32 %c, 0xc308c308;
        fma.rn.bf16x2 %made, %a, %b, %c;"""
    return Made(ptx, lambda bits: _as_bf16(((bits >> shift) & 15) ^ 0x4308) - jnp.bfloat16(136))


def _eight() -> Made:
    """A whole number of 8 bits: seven of them, less 128 where the sign is: 0x4380 is 256."""
    ptx = """
        lop3.b32 %a, %bits, 0x007f007f, 0x43004300, 0xea;  // (a & b) | c
        lop3.b32 %b, %bits, 0x00800080, 0x43004300, 0xea;
        mov.b32 %c, 0xbf80bf80;
        fma.rn.bf16x2 %made, %b, %c, %a;"""
    return Made(ptx, lambda bits: _as_bf16((bits & 0x7F) | 0x4300) - _as_bf16((bits & 0x80) | 0x4300))


def _e4m3() -> Made:
    """Exponent and fraction where bfloat16 has them, whose bias is 120 more. What is not a number becomes 480."""
    ptx = """
        shr.u32 %a, %bits, 4;
        and.b32 %a, %a, 0x07f007f0;
        lop3.b32 %a, %bits, 0x80008000, %a, 0xea;
        mov.b32 %b, 0x7b807b80;
        mov.b32 %c, 0x80008000;
        fma.rn.bf16x2 %made, %a, %b, %c;"""
    plain = lambda bits: _scaled((bits & _int(0x8000)) | ((bits >> 4) & 0x07F0), 120)  # noqa: E731
    return Made(ptx, plain)


def _e2m1(shift: int) -> Made:
    """The same of 4 bits, whose bias is 126 less."""
    ptx = f"""
        shl.b32 %a, %bits, {6 - shift};
        and.b32 %a, %a, 0x01c001c0;
        shl.b32 %b, %bits, {12 - shift};
        lop3.b32 %a, %b, 0x80008000, %a, 0xea;
        mov.b32 %b, 0x7e807e80;
        mov.b32 %c, 0x80008000;
        fma.rn.bf16x2 %made, %a, %b, %c;"""
    sign = lambda bits: (bits << (12 - shift)) & _int(0x8000)  # noqa: E731
    return Made(ptx, lambda bits: _scaled(sign(bits) | ((bits << (6 - shift)) & 0x01C0), 126))


def _scaled(bits: jax.Array, exponent: int) -> jax.Array:
    """A bfloat16 too small for a CPU, which takes such numbers for zero, times a power of two."""
    wide = (bits & 0x7FFF).astype(jnp.int32)
    fraction, power = wide & 0x7F, wide >> 7
    value = jnp.where(power == 0, fraction, 0x80 | fraction).astype(jnp.float32)
    value *= jnp.exp2((jnp.maximum(power, 1) - 127 - 7 + exponent).astype(jnp.float32))
    return jnp.where(bits < 0, -value, value).astype(jnp.bfloat16)


MADE: Mapping[Numbers, tuple[Made, ...]] = MappingProxyType(
    {"int8": (_eight(),), "fp8": (_e4m3(),), "int4": (_four(0), _four(4)), "fp4": (_e2m1(0), _e2m1(4))}
)
"""The numbers of a byte, those in its low bits first."""
COPY: Mapping[Numbers, int] = MappingProxyType({"int8": 0, "fp8": 1, "int4": 0, "fp4": 0})
"""Which of a byte's two copies they are made of: the one in the lower (0) or in the upper half of 16 bits."""
MINUS = "fma.rn.bf16x2 %made, %other, %b, %bits;", 0xBF80BF80
TIMES = "fma.rn.bf16x2 %made, %other, %bits, %b;", 0x80008000


def bytes_of(words: jax.Array, compiled: bool, how: Numbers | None = None) -> list[Bits]:
    """The bytes of each element of an array of int8, int16 or int32, the lowest first. To make numbers of `how`, one of
    the two bytes of an int16 is not moved: it lies where they are made of, and what is beside it is not looked at."""
    count = words.dtype.itemsize
    still = COPY[how] if count == 2 and how else None
    if count == 1:
        words = words.astype(jnp.int16)
    if compiled:
        moved = enumerate(selections(count))
        return [words if i == still else _ptx(select, jnp.int16, words) for i, select in moved]
    each = [(words >> (8 * i)).astype(jnp.int16) & 0xFF for i in range(count)]
    return [words if i == still else one | (one << 8) for i, one in enumerate(each)]


def selections(count: int) -> list[str]:
    """PTX that takes each byte of elements with so many of them, twice: two elements of 16 bits lie in one register."""
    if count < 4:
        return [f"prmt.b32 $0, $1, $1, 0x{0x2200 + 0x1111 * i:04x};" for i in range(count)]
    select = [i | i << 4 | (4 + i) << 8 | (4 + i) << 12 for i in range(count)]
    return [f"prmt.b32 $0, $1, $2, 0x{one:04x};" for one in select]


def numbers(bits: Bits, how: Numbers, compiled: bool) -> list[jax.Array]:
    """What a byte holds, in bfloat16, which has all of them."""
    if not compiled:
        return [made.plain(bits) for made in MADE[how]]
    return [_ptx(whole(made.ptx), jnp.bfloat16, bits) for made in MADE[how]]


ROUND = 1.5 * 2**23  # to which a number is added so that the lowest bits of the sum are the nearest whole number


def byte_of(x: jax.Array, how: Numbers) -> jax.Array:
    """The other way: x float32 as int8 or, cut to 448, as fp8 (e4m3), the bits in an int32. Triton makes no fp8 on an
    A100, and rounds no number to a whole one."""
    as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.int32)
    if how == "int8":
        return as_bits(x + ROUND) & 0xFF
    size = jnp.minimum(jnp.abs(x), 448.0)
    bits = as_bits(size)
    large = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # to the nearest even, and bias 7 for 127
    small = as_bits(size * 2.0**9 + ROUND) & 0xFF  # multiples of the smallest one
    return jnp.where(size < 2.0**-6, small, large) | ((as_bits(x) >> 24) & 0x80)


def minus(a: jax.Array, b: jax.Array, compiled: bool) -> jax.Array:
    """a - b of bfloat16, rounded once."""
    return _ptx(of_two(*MINUS), jnp.bfloat16, a, b) if compiled else a - b


def times(a: jax.Array, b: jax.Array, compiled: bool) -> jax.Array:
    """a b of bfloat16, rounded once."""
    return _ptx(of_two(*TIMES), jnp.bfloat16, a, b) if compiled else a * b


def apart(a: jax.Array, which: int, compiled: bool) -> jax.Array:
    """The same numbers, of which the compiler does not know that they are; no instruction is left of it."""
    return _ptx(f"mov.b32 $0, $1;  // {which}", a.dtype, a) if compiled and a.dtype == jnp.bfloat16 else a


def whole(ptx: str) -> str:
    """As inline assembly: names for what LLVM counts, registers of its own."""
    registers = "{ .reg .b32 %a, %b, %c;"
    return f"{registers}{ptx} }}".replace("%made", "$0").replace("%bits", "$1").replace("%other", "$2")


def of_two(ptx: str, constant: int) -> str:
    return whole(f" mov.b32 %b, 0x{constant:08x}; {ptx}")


def _ptx(assembly: str, dtype: jnp.dtype, *args: jax.Array) -> jax.Array:
    """Of two elements at a time; an argument of 32 bits is two registers, one of 16 bits is one."""
    inputs = sum(max(1, a.dtype.itemsize // 2) for a in args)
    [made] = triton.elementwise_inline_asm(
        assembly,
        args=args,
        constraints=",".join(["=r"] + ["r"] * inputs),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return made
