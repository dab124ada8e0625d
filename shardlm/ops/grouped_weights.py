"""Weights in few bits: numbers of 8 or 4 bits in groups along the dimension that is summed over, a scale for each group
(https://arxiv.org/abs/2305.14314 keeps a frozen base so; https://arxiv.org/abs/2210.17323, section 5, groups;
https://arxiv.org/abs/2209.05433, e4m3; `Groups`). They are made here, or lie so in a published checkpoint.

A group is GROUP elements, or the largest part of the dimension from 16 to that, or all of it. It depends on the weight
alone, so that a weight has the same values on every mesh. Two numbers of 4 bits share a byte: the first half of a group
is in the low bits.

Products with such weights are chosen by platform: of a weight that is made anew in the compute dtype, of few rows by a
kernel that reads it as it is held (grouped_kernel.py), and on a CPU by loops that do (cpu_grouped.py).
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import logging

from shardlm.errors import ShardlmError

Numbers = Literal["int8", "int4", "fp8", "fp4"]
"""Integers, e4m3 and e2m1 floats."""
GroupedFormat = Literal["dtype", "int8", "int4", "fp8"]
"""What weights are held in that no step changes: the compute dtype, integers of 8 or 4 bits, or e4m3."""
GroupedProducts = Literal["dequantised", "pallas", "looped"]
STORED = {name: np.dtype("i1") for name in ("int8", "int4", "fp4")} | {"fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
_LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
GROUP = 64
LONGEST = 128  # of published checkpoints' groups as they are held
# Rows up to which the kernel multiplies. A weight of one byte that is made anew moves 5 bytes a number, and the kernel
# 1 for all 64 rows that run together; beyond that it is the products that take the time, and cuBLAS's are faster.
FEW_ROWS = 256
# And of an expert, on average. All experts' weights are made anew together: where 2,048 tokens choose 8 of 128 that is
# 5 bytes a number for products of 128 rows, two blocks of the kernel's, which read 1. Further ones read it again.
FEW_ROWS_OF_EXPERT = 128
ROWS = 64  # of a program of the kernel, whose sums fit in registers
COLUMNS = 128  # of such a program: 128 bytes of a row of the weight, which lie together
# For a weight and few rows: about three for each of a GPU's multiprocessors, which has four schedulers to fill. What is
# counted of instructions leaves no time for waits (bench/machine_code.py).
PROGRAMS = 384
LEAST = 512  # numbers that are worth a program of their own, whose sums are written and read again; of few rows, half


@dataclasses.dataclass(frozen=True)
class Groups:
    """How a weight is held in groups.

    numbers    what it is held in
    longest    elements that share a scale, at most
    scale      dtype of the scales
    zeros      whether a group has a zero of its own: the weight is (number - zero) * scale
    whole      whether zeros are whole numbers
    within     elements of which no group may reach into the next, 0: any may
    published  whether numbers and scales are those of a checkpoint, which are not rounded again
    """

    numbers: Numbers
    longest: int = GROUP
    scale: str = "bfloat16"
    zeros: bool = False
    within: int = 0
    published: bool = False
    whole: bool = True

    @property
    def a_byte(self) -> int:
        """Numbers in one byte."""
        return 2 if self.numbers in ("int4", "fp4") else 1

    @property
    def stored(self) -> np.dtype:
        """The type of the bytes."""
        return STORED[self.numbers]

    @property
    def zero(self) -> str:
        """The type of the zeros: whole ones of 4 bits reach from -8 to 8, of 8 bits from -128 to 128."""
        if not self.whole:
            return "float32"
        return "int8" if self.a_byte == 2 else "int16"

    def size(self, of: int) -> int:
        """Elements that share a scale, of a dimension of size `of`. Raises ShardlmError where 4 bits have no pairs, or
        groups of a checkpoint no parts in it."""
        least = min(16, self.within or 16, self.longest)
        fit = [g for g in range(least, min(of, self.longest) + 1) if of % g == 0 and self.within % g == 0]
        group, kind = max(fit, default=of), self.numbers
        if self.within % group:
            raise ShardlmError(f"a weight's dimension of {of} has no parts that lie in groups of {self.within}")
        if group % self.a_byte:
            raise ShardlmError(f"a weight's dimension of {of} has no groups of even size for {kind}; hold it in int8")
        return group


OWN = {how: Groups(how) for how in _LARGEST}
"""Those that weights are made in here."""


class Grouped(NamedTuple):
    """A weight: bytes, scales and, where groups have them, zeros; arrays, or what stands for them."""

    values: jax.Array
    scale: jax.Array
    zero: jax.Array | None = None


def packed_shape(shape: tuple[int, ...], axis: int, groups: Groups) -> tuple[int, ...]:
    """Of the bytes of a weight [*shape]."""
    return (*shape[:axis], shape[axis] // groups.a_byte, *shape[axis + 1 :])


def scale_shape(shape: tuple[int, ...], axis: int, groups: Groups) -> tuple[int, ...]:
    """Of the scales, and of the zeros, of a weight [*shape]."""
    return (*shape[:axis], shape[axis] // groups.size(shape[axis]), *shape[axis + 1 :])


def grouped_axis(packed: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """The dimension that is grouped, from the shapes of the bytes and of the scales."""
    return next(i for i, (n, m) in enumerate(zip(packed, scale, strict=True)) if n != m)


def quantised(w: np.ndarray, axis: int, group: int, how: GroupedFormat) -> Grouped:
    """A weight, or whole groups of it, in few bits with scales bfloat16, on the host. Numbers are rounded against the
    scale as it is stored, so that its own rounding adds no error."""
    limit, groups = _LARGEST[how], OWN[how]
    split = _split(w, axis, group).astype(np.float32)
    scale = (np.abs(split).max(axis + 1) / limit).astype(groups.scale)
    step = np.where(scale == 0, 1, scale).astype(np.float32)
    numbers = np.clip(split / np.expand_dims(step, axis + 1), -limit, limit)
    numbers = (numbers if how == "fp8" else np.rint(numbers)).astype(groups.stored)
    return Grouped(_packed(numbers, axis, groups), scale)


def as_published(
    codes: np.ndarray, factors: np.ndarray, zeros: np.ndarray | None, axis: int, group: int, groups: Groups
) -> Grouped:
    """A checkpoint's codes (of 4 bits in int8) with the factors and the zeros of groups, on the host."""
    scale = factors.astype(groups.scale)
    same = scale.astype(np.float32) == factors
    assert (same | np.isnan(factors)).all(), f"scales are more than {groups.scale} holds"
    values = _packed(_split(codes, axis, group), axis, groups)
    return Grouped(values, scale, zeros if zeros is None else zeros.astype(groups.zero))


def _split(w: np.ndarray, axis: int, group: int) -> np.ndarray:
    """[*, groups, group, *]."""
    return w.reshape(*w.shape[:axis], -1, group, *w.shape[axis + 1 :])


def _packed(numbers: np.ndarray, axis: int, groups: Groups) -> np.ndarray:
    """[*, groups, group, *] as it is held."""
    if groups.a_byte == 2:
        low, high = np.split(numbers, 2, axis=axis + 1)
        numbers = low & 15
        numbers |= high << 4
    return numbers.reshape(*numbers.shape[:axis], -1, *numbers.shape[axis + 2 :])


def dequantised(held: Grouped, axis: int, groups: Groups, dtype: jnp.dtype) -> jax.Array:
    """The weight in `dtype`, `axis` whole on each device."""
    scale, packed = held.scale, held.values
    numbers = packed.reshape(*scale.shape[: axis + 1], -1, *scale.shape[axis + 1 :])
    if groups.a_byte == 2:
        numbers = jnp.concatenate(halves(numbers, groups.numbers), axis=axis + 1)
    numbers = numbers.astype(jnp.float32)
    if held.zero is not None:
        numbers -= jnp.expand_dims(held.zero.astype(jnp.float32), axis + 1)
    # Numbers of few bits by scales of 8 to 24: the product in float32 is rounded once, to `dtype`.
    w = (numbers * jnp.expand_dims(scale.astype(jnp.float32), axis + 1)).astype(dtype)
    return w.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


def halves(packed: jax.Array, numbers: Numbers) -> tuple[jax.Array, jax.Array]:
    """Of bytes with two numbers each, those in the low bits and those in the high ones; e2m1 as float32."""
    if numbers == "int4":
        return (packed << 4) >> 4, packed >> 4
    return from_fp4(packed & 15), from_fp4((packed >> 4) & 15)


def from_fp4(codes: jax.Array) -> jax.Array:
    """e2m1 from int8, float32: a sign, an exponent of 2 bits and a fraction of 1 (codes.FP4 in hf_quantised)."""
    exponent, fraction = (codes >> 1) & 3, codes & 1
    twice = jnp.where(exponent == 0, fraction, (2 + fraction) << jnp.maximum(exponent - 1, 0))
    return jnp.where(codes & 8, -twice, twice).astype(jnp.float32) * 0.5


def choose(platform: str) -> GroupedProducts:
    """The implementation for a platform."""
    chosen: GroupedProducts = {"gpu": "pallas", "cuda": "pallas", "cpu": "looped"}.get(platform, "dequantised")
    logging.vlog(1, "products with weights in few bits: %s, because platform is %s", chosen, platform)
    return chosen


def product(x: jax.Array, held: Grouped, groups: Groups, by: GroupedProducts) -> jax.Array:
    """x [M, K] times the weight [K, F] as it is held, on the arrays of one device."""
    if by == "looped":
        from shardlm.ops.cpu_grouped import looped  # which reads this module

        return looped(x, held, groups)
    from shardlm.ops.grouped_kernel import pallas  # Pallas takes a while to import

    return pallas(x, held, groups)


def expert_product(x: jax.Array, held: Grouped, group_sizes: jax.Array, groups: Groups, by: GroupedProducts):
    """The same of experts [E, K, F], each with its rows of x (grouped_kernel.py's of_experts)."""
    if by == "looped":
        from shardlm.ops.cpu_grouped import looped_experts

        return looped_experts(x, held, group_sizes, groups)
    from shardlm.ops.grouped_kernel import of_experts

    return of_experts(x, held, group_sizes, groups)


def groups_at_once(group: int, a_byte: int) -> int:
    """Small groups that the kernel reads at a time, so many numbers to a byte: 64 bytes of each column, or one group.
    MXFP4's are 16 bytes, of which each would be a product of its own."""
    held = group // a_byte
    return GROUP // held if group < GROUP and held & (held - 1) == 0 else 1


def step_of(group: int, a_byte: int) -> int:
    """Numbers that the kernel reads at a time: of a group, a part of one, or several."""
    several = groups_at_once(group, a_byte)
    if several > 1:
        return several * group
    return next(n for n in range(min(GROUP * a_byte, group), 0, -1) if group % n == 0)


def splits_of(summed: int, columns: int) -> int:
    """Parts of what is summed over, each by programs of its own; by the weight's shape alone."""
    return max(1, min(PROGRAMS // -(-columns // COLUMNS), summed // LEAST))


def parts_written(summed: int, columns: int, rows: int) -> int:
    """Those that are written and read again, 1: none. With several blocks of rows there are programs enough, and parts
    would be more than the weight: each program goes through all of them."""
    return 1 if rows > ROWS else splits_of(summed, columns)


def splits_of_experts(summed: int, columns: int, rows: int, experts: int) -> int:
    """The same of experts' weights while there are fewer rows than experts, and as many weights are read: one token's 8
    experts of 128 are 48 programs with 768 columns each."""
    programs = -(-columns // COLUMNS) * rows
    return max(1, min(PROGRAMS // programs, 2 * summed // LEAST)) if rows < experts else 1
