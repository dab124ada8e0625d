"""Projections of a served model that multiply 8-bit numbers: weights are held with a scale for each result, and
activations are quantised as they come, with a scale for each token. Known as FP8_DYNAMIC and as W8A8
(https://github.com/vllm-project/llm-compressor, "Schemes"; https://arxiv.org/abs/2211.10438, section 2).

A token's scale is its own, so that its numbers are the same beside any others; where what is summed over is split, its
maximum is taken over the devices, and the numbers are the same on every mesh. With "int8" they are those that a
training run with matmul=int8 multiplies (ops/quantized_matmul.py).

A weight lies with what it makes first, [*made, *summed]: so the matrix units take 8-bit floats, and XLA has no need to
turn it (compiled for an H100: two such weights behind one input are one kernel, and no copies).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardlm.ops.grouped_weights import STORED
from shardlm.ops.quantized_matmul import Quantized, multiply, quantize
from shardlm.ops.weight_format import DYNAMIC, WeightFormat, grouped

SCALE = np.dtype("float32")
_LARGEST = {"int8": 127, "fp8": 448}
E4M3 = (448, 416, 384, 352, 320, 288, 256, 240)  # one of each mantissa: a row's largest number is one of them
SAMPLE = 64  # weights of a result that are looked at: by all of them 41 ns of a core a number, by these 3 (measured)


def stored(how: WeightFormat) -> np.dtype:
    """The type of the numbers."""
    return STORED[DYNAMIC[how]]


def scales(w: np.ndarray, summed: Sequence[int], how: WeightFormat) -> np.ndarray:
    """Of each result, on the host, the scale at which the largest of its weights fits, float32 [*made]: w has all of
    them, in the dimensions `summed`. Where weights are e4m3 numbers by a scale of their result already, as published
    ones for a tensor or a row are, scales that find those again; by those any other weight fits too."""
    scale = by_largest(w, summed, how)
    if grouped(how) != "fp8":
        return scale
    sizes = np.abs(w).max(tuple(summed)).astype(np.float32)
    few = tuple(
        slice(0, SAMPLE if axis == max(summed) else 1) if axis in summed else slice(None) for axis in range(w.ndim)
    )
    tried = [sizes * (np.float32(1) / np.float32(size)) for size in E4M3]
    fits = np.array([_exact(w[few], one, summed).all(tuple(summed)) for one in tried])  # [sizes, *made]
    if not fits.any(axis=0).all():
        return scale
    return np.take_along_axis(np.array(tried), fits.argmax(axis=0)[None], axis=0)[0]


def by_largest(w: np.ndarray, summed: Sequence[int], how: WeightFormat) -> np.ndarray:
    """The same, as training has it (ops/quantized_matmul.py): whatever the numbers are already."""
    sizes = np.abs(w).max(tuple(summed)).astype(np.float32)
    return sizes * (np.float32(1) / np.float32(_LARGEST[grouped(how)]))  # as XLA divides by a constant


def _exact(w: np.ndarray, scale: np.ndarray, summed: Sequence[int]) -> np.ndarray:
    """Which weights are e4m3 numbers by these scales, but for how float32 rounds."""
    numbers = w * np.expand_dims(_inverse(scale), tuple(summed))
    return np.abs(numbers - numbers.astype(STORED["fp8"]).astype(np.float32)) <= 1e-6 * np.abs(numbers)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return 1 / np.where(scale == 0, np.float32(1), scale)


def by_result(w: np.ndarray, scale: np.ndarray, how: WeightFormat) -> np.ndarray:
    """The numbers of a weight [*made, *summed] or a part of it, on the host, by `scales`."""
    numbers = w.astype(np.float32) * _inverse(scale).reshape(*scale.shape, *(1,) * (w.ndim - scale.ndim))
    return (numbers if grouped(how) == "fp8" else np.rint(numbers)).astype(stored(how))


def dynamic_einsum(
    letters: str,
    x: jax.Array,
    values: jax.Array,
    scale: jax.Array,
    out_sharding: PartitionSpec | None = None,
    einsum: Callable[..., jax.Array] = jnp.einsum,
) -> jax.Array:
    """einsum(letters, x, w) in x's dtype; the letters of w, like `values`, begin with what it makes, whose scales are
    `scale`. `out_sharding` as for jnp.einsum; `einsum` multiplies the 8-bit numbers."""
    xs, ws = letters.split("->")[0].split(",")
    summed = tuple(i for i, letter in enumerate(xs) if letter in ws)
    x8 = quantize(x, values.dtype, summed, doublings=False)
    w8 = Quantized(values, jax.lax.expand_dims(scale, range(scale.ndim, values.ndim)))
    return multiply(letters, x8, w8, x.dtype, out_sharding, einsum)
