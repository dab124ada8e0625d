"""Products with weights as serving holds them: in 16 bits with norm and gate, in few bits, and in 8 that are
multiplied so."""

import functools
import math

import jax
import jax.numpy as jnp

from shardlm.bench import layer_products
from shardlm.bench.kernel import EIGHT_BITS, ROUNDED, Arrays, Kernel, local, named, nbytes_of, normal
from shardlm.bench.kernel_cases import FewBits, FewBitsExperts, Held8, LayerProducts
from shardlm.ops import grouped_kernel, grouped_matmul, grouped_weights
from shardlm.ops.dynamic_matmul import dynamic_einsum, stored
from shardlm.ops.grouped_weights import GROUP, Groups, dequantised, packed_shape, scale_shape
from shardlm.ops.weight_format import grouped


def held_8(s: Held8, on_gpu: bool) -> Kernel:
    held, number = (s.hidden, s.width), stored(s.how)

    def inputs(key: jax.Array) -> Arrays:
        (x,) = normal(key, (s.rows, s.width))
        if number.kind == "i":
            numbers = jax.random.randint(key, held, -127, 128, jnp.int8)
        else:
            numbers = jax.random.uniform(key, held, jnp.float32, -448, 448).astype(number)
        largest = 127 if number.kind == "i" else 448
        return x, numbers, jax.random.uniform(key, (s.hidden,), jnp.float32, 0.5, 1.5) * s.width**-0.5 / largest

    def restored(x, numbers, scale):
        w = numbers.astype(number).astype(jnp.float32) * scale[:, None]
        return jnp.einsum("nd,fd->nf", x, w.astype(x.dtype))

    return Kernel(
        what=f"XLA, {s.how}",
        inputs=inputs,
        run=lambda x, numbers, scale: dynamic_einsum("nd,fd->nf", x, numbers, scale),
        reference=restored,
        flops=2 * s.rows * s.width * s.hidden,
        nbytes=nbytes_of((held, "int8"), ((s.hidden,), "float32"), ((s.rows, s.width + s.hidden), "bfloat16")),
        peak=grouped(s.how),
        allowed=EIGHT_BITS[grouped(s.how)],
    )


def products_of_layer(s: LayerProducts, on_gpu: bool) -> Kernel:
    weights = [(shape, "bfloat16") for shape in layer_products.shapes(s)]
    return Kernel(
        what=named(s.fused, on_gpu),
        inputs=functools.partial(layer_products.inputs_of, s),
        run=local(functools.partial(layer_products.by_kernels, interpret=not on_gpu))
        if s.fused
        else layer_products.plainly,
        reference=layer_products.plainly,
        flops=2 * s.rows * sum(math.prod(shape) for shape, _ in weights),
        nbytes=nbytes_of(*weights, ((2 * s.rows, s.width), "bfloat16")),
        peak="bf16",
        allowed=2 * ROUNDED,  # one product after the other
    )


def few_bits(s: FewBits, on_gpu: bool) -> Kernel:
    shape = (s.width, s.hidden)

    def inputs(key: jax.Array) -> Arrays:
        return *normal(key, (s.rows, s.width)), *_in_groups(key, shape, 0, s.how)

    def anew(x, *held):
        return x @ dequantised(_held(s.how, held), 0, s.how, x.dtype)

    def by_kernel(x, *held):
        return grouped_kernel.pallas(x, grouped_weights.Grouped(*held), s.how, interpret=not on_gpu)

    return Kernel(
        what=named(s.kernel, on_gpu),
        inputs=inputs,
        run=local(by_kernel) if s.kernel else anew,
        reference=anew,
        flops=2 * s.rows * s.width * s.hidden,
        nbytes=nbytes_of(*_arrays_of(shape, 0, s.how), ((s.rows, s.width + s.hidden), "bfloat16")),
        peak="bf16",
        allowed=ROUNDED,
    )


def _arrays_of(shape: tuple[int, ...], axis: int, how: Groups) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what a weight is held in."""
    scales = scale_shape(shape, axis, how)
    return [(packed_shape(shape, axis, how), how.stored.name), (scales, how.scale), *[(scales, how.zero)] * how.zeros]


def _in_groups(key: jax.Array, shape: tuple[int, ...], axis: int, how: Groups) -> list[jax.Array]:
    """Any weight of this shape, as it is held."""
    (values, _), (scales, dtype), *zeros = _arrays_of(shape, axis, how)
    if how.stored.kind == "i":
        numbers = jax.random.randint(key, values, -128, 128, jnp.int8)
    else:
        numbers = jax.random.normal(key, values).astype(how.stored)
    factors = jax.random.uniform(key, scales, jnp.float32, 0.5, 1.5) * GROUP**-0.5
    return [numbers, factors.astype(dtype), *(jax.random.randint(key, own, -8, 9).astype(kind) for own, kind in zeros)]


def _held(how: Groups, arrays: Arrays) -> grouped_weights.Grouped:
    """A reference is given 8-bit floats in float32."""
    values, *rest = arrays
    return grouped_weights.Grouped(values.astype(how.stored), *rest)


def few_bits_experts(s: FewBitsExperts, on_gpu: bool) -> Kernel:
    shape = (s.experts, s.width, s.hidden)
    chosen = grouped_matmul.choose("gpu" if on_gpu else "cpu")

    def inputs(key: jax.Array) -> Arrays:
        (x,) = normal(key, (s.experts * s.rows, s.width))
        return x, jnp.full(s.experts, s.rows, jnp.int32), *_in_groups(key, shape, 1, s.how)

    def anew(multiply, x, sizes, *held):
        return multiply(x, dequantised(_held(s.how, held), 1, s.how, x.dtype), sizes)

    def by_kernel(x, sizes, *held):
        return grouped_kernel.of_experts(x, grouped_weights.Grouped(*held), sizes, s.how, interpret=not on_gpu)

    by_xla = functools.partial(anew, functools.partial(grouped_matmul.grouped_matmul, implementation=chosen))
    rows = s.experts * s.rows
    return Kernel(
        what=named(s.kernel, on_gpu, chosen),
        inputs=inputs,
        run=local(by_kernel if s.kernel else by_xla),
        reference=functools.partial(anew, grouped_matmul.reference),
        flops=2 * rows * s.width * s.hidden,
        nbytes=nbytes_of(*_arrays_of(shape, 1, s.how), ((rows, s.width + s.hidden), "bfloat16")),
        peak="bf16",
        allowed=ROUNDED,
    )
