"""Weight projections whose matmuls, forward and backward, multiply 8-bit numbers. Owns the number formats, their scales
and the derivative; which projections pass here is the layers' choice.

Scales are current: from the tensor at hand, without history. A maximum does not depend on the order it is taken in, so
the 8-bit numbers are the same on every mesh. It is taken over the whole tensor, at the price of an all-reduce of one
number for each activation, output gradient and weight; in a pipeline's stage and in a replica behind a slow link, over
the rows that they hold. Weights are quantised where they rest, so that FSDP's all-gather moves one byte a weight; the
backward pass gathers again rather than keep the gathered weight.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError

Matmul = Literal["dtype", "fp8", "int8", "W4A16", "W8A16", "FP8_DYNAMIC", "W8A8"]
"""What the projections of attention and MLP multiply; embedding, output head, router, norms and the attention itself
stay in the compute dtype.

dtype  the compute dtype
fp8    e4m3 weights and activations, e5m2 output gradients (https://arxiv.org/abs/2209.05433), one scale a tensor.
       Scales are powers of two: that costs a floating-point number no precision, and a bfloat16 product is exact under
       them, so XLA may hand them to cuBLASLt's fp8 kernel
int8   symmetric, a scale for each token and each output channel. The weight gradient, a sum over tokens of very
       different size, stays in the compute dtype (SwitchBack, https://arxiv.org/abs/2304.13013, section 2.2)
others what a folder will be served in that is written by the scheme of this name (ops/schemes.py): weights are rounded
       as they will be written, those of experts too, and with FP8_DYNAMIC and W8A8 activations of all but experts, a
       scale for each token. Gradients are those of what was rounded, in the compute dtype, and go to float32 weights
"""
EIGHT_BITS = ("fp8", "int8")
DYNAMIC = {"FP8_DYNAMIC": jnp.float8_e4m3fn, "W8A8": jnp.int8}


def in_eight_bits(matmul: Matmul, projection: bool) -> bool:
    """Whether training multiplies a weight, and what comes to it, as numbers of 8 bits. projection: whether schemes
    write it in few bits."""
    return matmul in EIGHT_BITS or (matmul in DYNAMIC and projection)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """values (8 bits) times scale (float32, of the same rank, size 1 where it is shared) is the array."""

    values: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class _Site:
    """The static part of one projection: the letters of its three arrays, where the layer wants the weight, and where
    the output goes (None: where its operands say)."""

    x: str
    w: str
    y: str
    matmul: Matmul
    use: PartitionSpec
    out: PartitionSpec | None


def quantized_einsum(
    letters: str,
    x: jax.Array,
    w: jax.Array,
    matmul: Matmul,
    *,
    use: PartitionSpec,
    out_sharding: PartitionSpec | None = None,
) -> jax.Array:
    """einsum(letters, x, w) in x's dtype (bfloat16 or float32), multiplying 8-bit numbers.

    w is the weight as it rests, and its gradient rests there too; `use` is where the layer wants it (Rules.use). It is
    quantised from x's dtype, so that a copy of w in that dtype gives the same; by a scheme from its own. Each letter
    stands in two of the three arrays, in the same order. `out_sharding` is needed where a split dimension is summed
    over, as for jnp.einsum.

    Raises ShardlmError for a `matmul` without 8 bits, and for float16, whose range ends before the products.
    """
    if matmul not in (*EIGHT_BITS, *DYNAMIC):
        raise ShardlmError(f"unknown 8-bit matmul {matmul!r}; choose from {', '.join((*EIGHT_BITS, *DYNAMIC))}")
    if x.dtype == jnp.float16:
        raise ShardlmError(f"{matmul} products do not fit float16, which ends at 65,504; use bfloat16 or float32")
    inputs, y = letters.split("->")
    w = w if matmul in DYNAMIC else w.astype(x.dtype)
    return _project(_Site(*inputs.split(","), y, matmul, use, out_sharding), x, w)


def quantize(a: jax.Array, dtype: jnp.dtype, shared: tuple[int, ...], *, doublings: bool = True) -> Quantized:
    """The nearest 8-bit numbers, with one scale for each slice over the dimensions `shared`: the smallest at which its
    largest element fits; for a float type, with `doublings`, the smallest power of two. The scale of a slice that is
    not finite is NaN, and so is whatever is computed from it."""
    a = a.astype(jnp.float32)
    largest = jnp.max(jnp.abs(a), axis=shared, keepdims=True)
    if dtype == jnp.int8:
        scale = largest / 127
    elif not doublings:
        scale = largest / float(jnp.finfo(dtype).max)
    else:
        fraction, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))  # fraction in [1/2, 1)
        scale = jnp.ldexp(jnp.ones_like(largest), jnp.where(fraction == 0.5, exponent - 1, exponent))
    scale = jnp.where(jnp.isfinite(largest), jnp.maximum(scale, jnp.finfo(jnp.float32).tiny), jnp.nan)
    scaled = a * (1 / scale)  # as XLA:CPU divides anyway, and the host does for weights that are served
    return Quantized((jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(site: _Site, x: jax.Array, w: jax.Array) -> jax.Array:
    return _forward(site, x, w)[0]


def _forward(site: _Site, x: jax.Array, w: jax.Array):
    summed = set(site.x) & set(site.w)
    x8, w8 = _quantize(site, x, site.x, summed), _quantize(site, w, site.w, summed)
    y = multiply(f"{site.x},{site.w}->{site.y}", x8, _move(w8, site.use), x.dtype, site.out)
    return y, (x, w) if site.matmul == "int8" else (x8, w8)


def _backward(site: _Site, kept, dy: jax.Array):
    x, w = kept
    summed, to_x, to_w = set(site.y) & set(site.w), f"{site.y},{site.w}->{site.x}", f"{site.x},{site.y}->{site.w}"
    stream, rest = (_spec(a.values if isinstance(a, Quantized) else a) for a in kept)
    split = dict(zip(site.w, _parts(site.use, len(site.w)), strict=True)) | dict(zip(site.x, stream, strict=True))
    used = PartitionSpec(*(split[letter] for letter in site.y))  # whole where the output was scattered
    if site.matmul in DYNAMIC:
        dy, x, w8 = jax.reshard(dy, used), _number(x, dy.dtype), _move(w, site.use)
        dw = jnp.einsum(to_w, x, dy, out_sharding=rest).astype(jnp.float32)
        return jnp.einsum(to_x, dy, _number(w8, dy.dtype), out_sharding=stream), dw
    if site.matmul == "fp8":
        dy8, w8 = _move(_quantize(site, dy, site.y, summed, jnp.float8_e5m2), used), w
        dw = multiply(to_w, x, dy8, dy.dtype, rest)
    else:
        dy = jax.reshard(dy, used)
        dy8, w8 = _quantize(site, dy, site.y, summed), _quantize(site, w, site.w, summed)
        dw = jnp.einsum(to_w, x, dy, out_sharding=rest)
    return multiply(to_x, dy8, _move(w8, site.use), dy.dtype, stream), dw


_project.defvjp(_forward, _backward)


def _quantize(site: _Site, a: jax.Array, letters: str, summed: set[str], fp8=jnp.float8_e4m3fn) -> Quantized:
    """In the site's format: one scale in fp8; in others one for each slice that a matmul sums over."""
    if site.matmul == "fp8":
        return quantize(a, fp8, tuple(range(a.ndim)))
    slices = tuple(i for i, letter in enumerate(letters) if letter in summed)
    return quantize(a, DYNAMIC.get(site.matmul, jnp.int8), slices, doublings=False)


def _number(a: Quantized, dtype: jnp.dtype) -> jax.Array:
    """What it stands for."""
    return (a.values.astype(jnp.float32) * a.scale).astype(dtype)


def _move(a: Quantized, spec: PartitionSpec) -> Quantized:
    """The same numbers split as `spec` says; a collective moves 8 bits for each."""
    return Quantized(jax.reshard(a.values, spec), jax.reshard(a.scale, _own(spec, a.scale.shape)))


def multiply(
    letters: str,
    a: Quantized,
    b: Quantized,
    dtype: jnp.dtype,
    out: PartitionSpec | None,
    einsum: Callable[..., jax.Array] = jnp.einsum,
) -> jax.Array:
    """`einsum` of the values, times the scales, summed over the devices where a split dimension is summed over: last,
    and in `dtype`, so that an all-reduce or reduce-scatter moves no more than without 8 bits. Scales multiply in
    float32, but for two numbers that are powers of two."""
    first, second, result = letters.replace("->", ",").split(",")
    split = dict(zip(second, _spec(b.values), strict=True)) | dict(zip(first, _spec(a.values), strict=True))
    local = PartitionSpec(*(split[letter] for letter in result))
    # Axes over which devices hold parts of the sum. In a manual region (a pipeline's stage) jax cannot type an array of
    # parts, and the sum comes first: of int32, or of unscaled numbers in `dtype`.
    pending = set(jax.tree.leaves([split[letter] for letter in set(first) & set(second) - set(result)]))
    if pending and jax.sharding.get_abstract_mesh().manual_axes:
        local, pending = out, set()
    integers = a.values.dtype == jnp.int8
    exact = jnp.int32 if integers else dtype
    parts = PartitionSpec(*local, unreduced=pending)
    y = einsum(letters, a.values, b.values, preferred_element_type=exact, out_sharding=parts)
    scale = _spread(a.scale, first, result) * _spread(b.scale, second, result)
    scale = jax.reshard(scale, PartitionSpec(*_own(local, scale.shape), reduced=pending))
    plain = scale.size == 1 and not integers
    y = y * scale.astype(dtype) if plain else (y.astype(jnp.float32) * scale).astype(dtype)
    return y if out is None else jax.reshard(y, out)


def _spread(scale: jax.Array, letters: str, result: str) -> jax.Array:
    """A scale's dimensions where the result has them, and size 1 elsewhere."""
    scale = jax.lax.squeeze(scale, [i for i, letter in enumerate(letters) if letter not in result])
    return jax.lax.expand_dims(scale, [i for i, letter in enumerate(result) if letter not in letters])


def _own(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """Of a scale beside values split as `spec` says: its dimensions of size 1 are whole."""
    return PartitionSpec(*(None if n == 1 else part for n, part in zip(shape, _parts(spec, len(shape)), strict=True)))


def _spec(a: jax.Array) -> PartitionSpec:
    """Where an array is, with a part for each of its dimensions."""
    return _parts(jax.typeof(a).sharding.spec, a.ndim)


def _parts(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))
