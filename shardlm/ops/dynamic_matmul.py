"""Projections of a served model that multiply 8-bit numbers: weights are held with a scale for each result, and
activations are quantised as they come, with a scale for each token. Known as FP8_DYNAMIC and as W8A8
(https://github.com/vllm-project/llm-compressor, "Schemes"; https://arxiv.org/abs/2211.10438, section 2).

A token's scale is its own, so that its numbers are the same beside any others; where what is summed over is split, its
maximum is taken over the devices, and the numbers are the same on every mesh. With "int8" they are those that a
training run with matmul=int8 multiplies (ops/quantized_matmul.py).

A weight lies with what it makes first, [*made, *summed]: so the matrix units take 8-bit floats, and XLA has no need to
turn it (compiled for an H100: two such weights behind one input are one kernel, and no copies).
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from shardlm.ops.grouped_weights import DYNAMIC, STORED, WeightFormat, grouped
from shardlm.ops.quantized_matmul import Quantized, multiply, quantize

SCALE = np.dtype("float32")
_LARGEST = {"int8": 127, "fp8": 448}


def stored(how: WeightFormat) -> np.dtype:
    """The type of the numbers."""
    return STORED[DYNAMIC[how]]


def largest(w: np.ndarray, summed: Sequence[int]) -> np.ndarray:
    """Of each result's weights, their largest size, float32."""
    return np.abs(w).max(tuple(summed)).astype(np.float32)


def by_result(w: np.ndarray, sizes: np.ndarray, how: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, scales float32) of a weight [*made, *summed] or a part of it, on the host, whose results' largest sizes
    are `sizes` [*made]. Those of a checkpoint that was made so are found again."""
    scale = sizes * (np.float32(1) / np.float32(_LARGEST[grouped(how)]))  # as XLA divides by a constant
    inverse = 1 / np.where(scale == 0, np.float32(1), scale)
    numbers = w.astype(np.float32) * inverse.reshape(*scale.shape, *(1,) * (w.ndim - scale.ndim))
    return (numbers if grouped(how) == "fp8" else np.rint(numbers)).astype(stored(how)), scale


def dynamic_einsum(
    letters: str, x: jax.Array, values: jax.Array, scale: jax.Array, out_sharding: PartitionSpec | None = None
) -> jax.Array:
    """einsum(letters, x, w) in x's dtype; the letters of w, like `values`, begin with what it makes, whose scales are
    `scale`. `out_sharding` as for jnp.einsum."""
    xs, ws = letters.split("->")[0].split(",")
    summed = tuple(i for i, letter in enumerate(xs) if letter in ws)
    x8 = quantize(x, values.dtype, summed, doublings=False)
    w8 = Quantized(values, jax.lax.expand_dims(scale, range(scale.ndim, values.ndim)))
    return multiply(letters, x8, w8, x.dtype, out_sharding)
