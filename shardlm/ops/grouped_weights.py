"""Weights in few bits: symmetric integers or e4m3 numbers in groups along the dimension that is summed over, a scale
for each group (https://arxiv.org/abs/2305.14314 keeps a frozen base so; https://arxiv.org/abs/2210.17323, section 5,
groups; https://arxiv.org/abs/2209.05433, e4m3).

A group is GROUP elements, or the largest part of the dimension from 16 to that, or all of it. It depends on the weight
alone, so that a weight has the same values on every mesh. Two 4-bit integers share a byte: the first half of a group is
in the low bits.

Products with such weights are chosen by platform: of a weight that is made anew in the compute dtype, and of few rows
by a kernel that reads it as it is held (grouped_kernel.py).
"""

from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl import logging

from shardlm.errors import ShardlmError

GroupedFormat = Literal["dtype", "int8", "int4", "fp8"]
"""What weights are held in that no step changes: the compute dtype, integers of 8 or 4 bits, or e4m3."""
WeightFormat = Literal["dtype", "int8", "int4", "fp8", "int8_dynamic", "fp8_dynamic"]
"""The same of a served model; the last two: projections multiply numbers of 8 bits (ops/dynamic_matmul.py), and experts
and what is multiplied by each head are held in groups of such."""
DYNAMIC: dict[WeightFormat, GroupedFormat] = {"int8_dynamic": "int8", "fp8_dynamic": "fp8"}
GroupedProducts = Literal["dequantised", "pallas"]
STORED = {name: np.dtype(held) for name, held in (("int8", "i1"), ("int4", "i1"), ("fp8", ml_dtypes.float8_e4m3fn))}
QUANTIZATIONS = (*STORED, *DYNAMIC)
_LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
GROUP = 64
SCALE = ml_dtypes.bfloat16
# Rows up to which the kernel multiplies. A weight of one byte that is made anew moves 5 bytes a number, and the kernel
# 1 for every 128 rows; beyond two such blocks it is the products that take the time, and cuBLAS's are faster.
FEW_ROWS = 256
# And of an expert, on average. All experts' weights are made anew together: where 2,048 tokens choose 8 of 128 that is
# 5 bytes a number for products of 128 rows, a block of the kernel's, which reads 1. Further blocks read it again.
FEW_ROWS_OF_EXPERT = 128
COLUMNS = 64  # of such a program: 64 bytes of a row of the weight, which lie together
PROGRAMS = 256  # for a weight and few rows: about two for each of a GPU's multiprocessors
LEAST_GROUPS = 4  # that are worth a program of their own, whose sums are written and read again


def grouped(how: WeightFormat) -> GroupedFormat:
    """What is held in groups is held in."""
    return DYNAMIC.get(how, how)


def group_of(size: int, how: GroupedFormat) -> int:
    """Elements that share a scale, of a dimension of `size`. Raises ShardlmError where 4 bits have no pairs."""
    group = max((g for g in range(16, min(size, GROUP) + 1) if size % g == 0), default=size)
    if how == "int4" and group % 2:
        raise ShardlmError(f"a weight's dimension of {size} has no groups of even size for int4; hold it in int8")
    return group


def packed_shape(shape: tuple[int, ...], axis: int, how: GroupedFormat) -> tuple[int, ...]:
    """Of the bytes of a weight [*shape]."""
    return (*shape[:axis], shape[axis] // numbers_a_byte(how), *shape[axis + 1 :])


def numbers_a_byte(how: GroupedFormat) -> int:
    return 2 if how == "int4" else 1


def scale_shape(shape: tuple[int, ...], axis: int, how: GroupedFormat) -> tuple[int, ...]:
    """Of the scales of a weight [*shape]."""
    return (*shape[:axis], shape[axis] // group_of(shape[axis], how), *shape[axis + 1 :])


def grouped_axis(packed: tuple[int, ...], scale: tuple[int, ...]) -> int:
    """The dimension that is grouped, from the shapes of the bytes and of the scales."""
    return next(i for i, (n, m) in enumerate(zip(packed, scale, strict=True)) if n != m)


def quantised(w: np.ndarray, axis: int, group: int, how: GroupedFormat) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of STORED[how], scales bfloat16) of a weight or of whole groups of it, on the host. Numbers are rounded
    against the scale as it is stored, so that its own rounding adds no error."""
    limit = _LARGEST[how]
    split = w.reshape(*w.shape[:axis], -1, group, *w.shape[axis + 1 :]).astype(np.float32)
    scale = (np.abs(split).max(axis + 1) / limit).astype(SCALE)
    step = np.where(scale == 0, 1, scale).astype(np.float32)
    numbers = np.clip(split / np.expand_dims(step, axis + 1), -limit, limit)
    numbers = (numbers if how == "fp8" else np.rint(numbers)).astype(STORED[how])
    if how == "int4":
        low, high = np.split(numbers, 2, axis=axis + 1)
        numbers = (low & 15) | (high << 4)
    return numbers.reshape(*w.shape[:axis], -1, *w.shape[axis + 1 :]), scale


def dequantised(packed: jax.Array, scale: jax.Array, axis: int, how: GroupedFormat, dtype: jnp.dtype) -> jax.Array:
    """The weight in `dtype`: `packed` and `scale` as `quantised` makes them, `axis` whole on each device."""
    numbers = packed.reshape(*scale.shape[: axis + 1], -1, *scale.shape[axis + 1 :])
    if how == "int4":
        low = jax.lax.shift_right_arithmetic(jax.lax.shift_left(numbers, jnp.int8(4)), jnp.int8(4))
        high = jax.lax.shift_right_arithmetic(numbers, jnp.int8(4))
        numbers = jnp.concatenate([low, high], axis=axis + 1)
    w = numbers.astype(dtype) * jnp.expand_dims(scale.astype(dtype), axis + 1)
    return w.reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


def choose(platform: str) -> GroupedProducts:
    """The implementation for a platform."""
    chosen: GroupedProducts = "pallas" if platform in ("gpu", "cuda") else "dequantised"
    logging.vlog(1, "products with weights in few bits: %s, because platform is %s", chosen, platform)
    return chosen


def product(x: jax.Array, packed: jax.Array, scale: jax.Array, how: GroupedFormat) -> jax.Array:
    """By the kernel: x [M, K] times the weight [K, F], on the arrays of one device."""
    from shardlm.ops.grouped_kernel import pallas  # Pallas takes a while to import

    return pallas(x, packed, scale, how)


def expert_product(x: jax.Array, packed: jax.Array, scale: jax.Array, group_sizes: jax.Array, how: GroupedFormat):
    """The same of experts [E, K, F], each with its rows of x (grouped_kernel.py's of_experts)."""
    from shardlm.ops.grouped_kernel import of_experts

    return of_experts(x, packed, scale, group_sizes, how)


def splits_of(groups: int, columns: int) -> int:
    """Parts of the groups that the kernel's programs sum up; by the weight's shape alone."""
    return max(1, min(PROGRAMS // -(-columns // COLUMNS), groups // LEAST_GROUPS))
