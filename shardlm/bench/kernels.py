"""The kernels of GPUs beside their references: what runs for each shape of kernel_cases.py, and what it takes. On a CPU
the kernels that it has stand in: Pallas interpreted, XLA's attention, blocked matmuls."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.bench import recurrent_kernels
from shardlm.bench.attention_in_turns import in_turns
from shardlm.bench.kernel_cases import (
    PAGE,
    EightBit,
    FewBits,
    FewBitsExperts,
    Grouped,
    Held8,
    Meeting,
    Paged,
    Recurrent,
    Shape,
    Whole,
)
from shardlm.flops import attention_pairs
from shardlm.mesh import MeshSpec, shard_map
from shardlm.ops import attention, attention_pair, grouped_kernel, grouped_matmul, grouped_weights, paged_attention
from shardlm.ops.attention_pair import Pair, Side
from shardlm.ops.chunk_attention import in_parts
from shardlm.ops.dynamic_matmul import dynamic_einsum, stored
from shardlm.ops.grouped_weights import GROUP, Groups, dequantised, packed_shape, scale_shape
from shardlm.ops.kv_format import packed, unpacked
from shardlm.ops.paged_kernel import pallas
from shardlm.ops.quantized_matmul import quantized_einsum
from shardlm.ops.weight_format import grouped
from shardlm.rules import Rules

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All functions are called under a mesh of one device.

    what       the implementation that is timed
    inputs     key -> arguments, the first an array of a floating type
    run        arguments -> results
    reference  the same, plainly; it is given floating-point arguments in float32
    flops, nbytes  that the mathematics asks for, and that have to be read and written at least
    peak       type whose peak rate it is held to
    allowed    largest error, as a share of the largest number of the result
    in_loop    whether many runs are timed as one program: not where XLA lays the arguments of a loop out anew (8-bit
               products: two copies of 180 MB a run, compiled), which a call of a millisecond does not need
    """

    what: str
    inputs: Callable[[jax.Array], Arrays]
    run: Callable[..., Any]
    reference: Callable[..., Any]
    flops: float
    nbytes: float
    peak: str
    allowed: float
    in_loop: bool = True


# bfloat16 has 8 bits: results are rounded to 2**-9 of their size, weights of softmax and gradients on the way too.
ROUNDED, ROUNDED_BACK = 0.01, 0.03
# One 8-bit product of two numbers is off by up to 2**-4 (e4m3) or 2**-8 of the largest (int8); sums even that out.
EIGHT_BITS = {"fp8": 0.08, "int8": 0.03}


def kernel_of(shape: Shape, on_gpu: bool) -> Kernel:
    """What is measured at a shape."""
    return _MAKERS[type(shape)](shape, on_gpu)


def normal(key: jax.Array, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Numbers of size 1 in bfloat16."""
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


def with_back(f: Callable, operands: int) -> Callable:
    """(operands, cotangent of the result, rest) -> the gradients of f(operands, rest)."""

    def run(*args):
        some, d_out, rest = args[:operands], args[operands], args[operands + 1 :]
        return jax.vjp(lambda *a: f(*a, *rest), *some)[1](d_out)

    return run


def local(f: Callable) -> Callable:
    """f on the arrays of a device, as inside of a model."""
    return shard_map(f, in_specs=PartitionSpec(), out_specs=PartitionSpec())


def nbytes_of(*arrays) -> int:
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in arrays)


def _paged(s: Paged, on_gpu: bool) -> Kernel:
    scale, rule = s.width**-0.5, {"window": s.window, "softcap": s.softcap}
    pages, values = s.rows * (s.context // PAGE) + 1, s.value_dim or s.width
    names = ("k",) if s.value_dim else ("k", "v")

    def inputs(key: jax.Array) -> Arrays:
        pool = (pages, PAGE, s.kv_heads, s.width)
        q, *pools = normal(key, (s.rows, s.tokens, s.heads, s.width), *[pool] * len(names))
        held = dict(zip(names, pools, strict=True))
        if s.how != "auto":
            for name in names:
                held[name], number = packed(held[name], s.how)
                held |= {} if number is None else {f"{name}_scale": number}
        table = 1 + jax.random.permutation(key, pages - 1).reshape(s.rows, -1).astype(jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(s.context - s.tokens, s.context, dtype=jnp.int32), (s.rows, s.tokens))
        rows = table[:, (s.context - s.tokens) // PAGE :]  # of the chunk alone
        own = {n: held[n][rows].reshape(s.rows, s.tokens, s.kv_heads, s.width) for n in names} if s.in_parts else {}
        return q, held, table, positions, own

    def run(q, held, table, positions, own):
        if s.in_parts:
            where = (held, table, positions[:, 0], jnp.int32(0))
            return in_parts(q, own["k"], own["v"], *where, scale, "cudnn" if on_gpu else "xla")
        scales = {name: a for name, a in held.items() if name.endswith("_scale")}
        options = rule | scales | {"value_dim": s.value_dim, "interpret": not on_gpu}
        return pallas(q, held["k"], held.get("v"), table, positions, jnp.int32(0), scale, **options)

    def reference(q, held, table, positions, own):
        exact = {n: held[n] if s.how == "auto" else unpacked(held[n], held.get(f"{n}_scale"), q.dtype) for n in names}
        k, v = exact["k"], exact.get("v", exact["k"][..., :values])
        return paged_attention.reference(q, k, v, table, positions, jnp.int32(0), scale, **rule)

    seen = attention_pairs([s.context], s.window or None) - attention_pairs([s.context - s.tokens], s.window or None)
    kept = min(s.context, s.window + s.tokens - 1) if s.window else s.context
    numbers = s.rows * kept * s.kv_heads * (s.width if s.value_dim else 2 * s.width)
    ends = s.rows * s.tokens * s.heads * (s.width + values) * 2
    return Kernel(
        what="in parts" if s.in_parts else "pallas" if on_gpu else "pallas, interpreted",
        inputs=inputs,
        run=local(run),
        reference=reference,
        flops=2 * s.rows * s.heads * (s.width + values) * seen,
        nbytes=numbers * (2 if s.how == "auto" else 1) + ends,
        peak="bf16",
        allowed=ROUNDED,
    )


def _whole(s: Whole, on_gpu: bool) -> Kernel:
    options = {"scale": s.width**-0.5, "rules": Rules.make("zero3", MeshSpec()), "window": s.window}
    chosen = "cudnn" if on_gpu else "xla"
    wide, narrow = (s.rows, s.length, s.heads, s.width), (s.rows, s.length, s.kv_heads, s.width)

    def inputs(key: jax.Array) -> Arrays:
        each = s.length // s.documents
        segments = 1 + jnp.minimum(jnp.arange(s.length, dtype=jnp.int32) // each, s.documents - 1)
        arrays = normal(key, wide, narrow, narrow, *[wide] * s.back)
        return *arrays, jnp.broadcast_to(segments, (s.rows, s.length))

    def sinks() -> jax.Array | None:
        return jnp.linspace(-2.0, 6.0, s.heads) if s.sinks else None  # from hardly any of the weight to most

    def run(q, k, v, segments):
        return attention.packed_attention(q, k, v, segments, implementation=chosen, sinks=sinks(), **options)

    def reference(q, k, v, segments, sinks):
        return attention.reference(q, k, v, segments, options["scale"], s.window, sinks=sinks if s.sinks else None)

    lengths = [s.length // s.documents] * s.documents
    lengths[-1] += s.length % s.documents
    pairs = s.rows * attention_pairs(lengths, s.window or None)
    each = nbytes_of((wide, "bfloat16"), (narrow, "bfloat16"))
    return Kernel(
        what=chosen,
        inputs=inputs,
        run=with_back(run, 3) if s.back else run,
        reference=in_turns(s, with_back(reference, 3) if s.back else reference, sinks),
        flops=4 * s.heads * s.width * pairs * (3 if s.back else 1),
        nbytes=each * (4 if s.back else 2),
        peak="bf16",
        allowed=ROUNDED_BACK if s.back else ROUNDED,
    )


def _meeting(s: Meeting, on_gpu: bool) -> Kernel:
    chosen = "cudnn" if on_gpu else "xla"
    pair = Pair(s.width**-0.5, s.diagonal, 0, chosen)
    plain = dataclasses.replace(pair, implementation="xla")
    wide, narrow = (s.rows, s.length, s.heads, s.width), (s.rows, s.length, s.kv_heads, s.width)

    def sides() -> tuple[Side, Side]:
        index, one = jnp.arange(s.length, dtype=jnp.int32), jnp.ones((s.rows, s.length), jnp.int32)
        return Side(index if s.diagonal else index + s.length, one), Side(index, one)

    def inputs(key: jax.Array) -> Arrays:
        q, k, v, d_out = normal(key, wide, narrow, narrow, wide)
        if not s.back:
            return q, k, v
        exact = [a.astype(jnp.float32) for a in (q, k, v)]
        out, lse = attention_pair.forward(plain, *exact, *sides())
        return q, k, v, out.astype(q.dtype), lse, d_out.astype(jnp.float32)

    def of(how: Pair) -> Callable:
        if s.back:
            return lambda q, k, v, *whole: attention_pair.backward(how, q, k, v, *sides(), *whole)
        return lambda q, k, v: attention_pair.forward(how, q, k, v, *sides())

    pairs = s.rows * (attention_pairs([s.length]) if s.diagonal else s.length**2)
    each = nbytes_of((wide, "bfloat16"), (narrow, "bfloat16"))
    return Kernel(
        what=chosen,
        inputs=inputs,
        run=local(of(pair)),
        reference=local(of(plain)),
        flops=4 * s.heads * s.width * pairs * (2 if s.back else 1),
        nbytes=each * (4 if s.back else 2),
        peak="bf16",
        allowed=ROUNDED_BACK if s.back else ROUNDED,
    )


def _grouped(s: Grouped, on_gpu: bool) -> Kernel:
    chosen = grouped_matmul.choose("gpu" if on_gpu else "cpu")

    def inputs(key: jax.Array) -> Arrays:
        x, w, dy = normal(key, (s.rows, s.width), (s.groups, s.width, s.hidden), (s.rows, s.hidden))
        return x, w * s.width**-0.5, *([dy] if s.back else []), jnp.asarray(sizes, jnp.int32)

    share = s.rows // s.groups
    sizes = [share] * (s.groups - 3) + [0, share // 2, 2 * share]  # the rows beyond belong to none
    run = lambda x, w, n: grouped_matmul.grouped_matmul(x, w, n, implementation=chosen)  # noqa: E731
    arrays = [((s.rows, s.width), "bfloat16"), ((s.groups, s.width, s.hidden), "bfloat16")]
    return Kernel(
        what=chosen,
        inputs=inputs,
        run=local(with_back(run, 2) if s.back else run),
        reference=with_back(grouped_matmul.reference, 2) if s.back else grouped_matmul.reference,
        flops=(4 if s.back else 2) * sum(sizes) * s.width * s.hidden,
        nbytes=nbytes_of(*arrays, ((s.rows, s.hidden), "bfloat16")) * (2 if s.back else 1),
        peak="bf16",
        allowed=ROUNDED,
    )


def _eight_bit(s: EightBit, on_gpu: bool) -> Kernel:
    letters, whole = "nd,df->nf", PartitionSpec(None, None)

    def inputs(key: jax.Array) -> Arrays:
        x, w, dy = normal(key, (s.rows, s.width), (s.width, s.hidden), (s.rows, s.hidden))
        return x, w * s.width**-0.5, *([dy] if s.back else [])

    run = lambda x, w: quantized_einsum(letters, x, w, s.matmul, use=whole)  # noqa: E731
    reference = lambda x, w: jnp.einsum(letters, x, w)  # noqa: E731
    arrays = [((s.rows, s.width), "bfloat16"), ((s.width, s.hidden), "bfloat16"), ((s.rows, s.hidden), "bfloat16")]
    return Kernel(
        what=f"XLA, {s.matmul}",
        inputs=inputs,
        run=with_back(run, 2) if s.back else run,
        reference=with_back(reference, 2) if s.back else reference,
        flops=(4 if s.back else 2) * s.rows * s.width * s.hidden,
        nbytes=nbytes_of(*arrays),
        peak=s.matmul,
        allowed=EIGHT_BITS[s.matmul],
        in_loop=False,
    )


def _held_8(s: Held8, on_gpu: bool) -> Kernel:
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


def _few_bits(s: FewBits, on_gpu: bool) -> Kernel:
    shape = (s.width, s.hidden)

    def inputs(key: jax.Array) -> Arrays:
        return *normal(key, (s.rows, s.width)), *_in_groups(key, shape, 0, s.how)

    def anew(x, *held):
        return x @ dequantised(_held(s.how, held), 0, s.how, x.dtype)

    def by_kernel(x, *held):
        return grouped_kernel.pallas(x, grouped_weights.Grouped(*held), s.how, interpret=not on_gpu)

    return Kernel(
        what=_named(s.kernel, on_gpu),
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


def _few_bits_experts(s: FewBitsExperts, on_gpu: bool) -> Kernel:
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
        what=_named(s.kernel, on_gpu, chosen),
        inputs=inputs,
        run=local(by_kernel if s.kernel else by_xla),
        reference=functools.partial(anew, grouped_matmul.reference),
        flops=2 * rows * s.width * s.hidden,
        nbytes=nbytes_of(*_arrays_of(shape, 1, s.how), ((rows, s.width + s.hidden), "bfloat16")),
        peak="bf16",
        allowed=ROUNDED,
    )


def _recurrent(s: Recurrent, on_gpu: bool) -> Kernel:
    run, reference = recurrent_kernels.served(s, on_gpu) if s.served else recurrent_kernels.in_chunks(s)
    flops, nbytes = recurrent_kernels.least(s)
    return Kernel(
        what=_named(s.served, on_gpu, "in chunks"),
        inputs=recurrent_kernels.inputs_of(s),
        run=local(run),
        reference=reference,
        flops=flops,
        nbytes=nbytes,
        peak="bf16",
        # States are sums of keys and values that a convolution has made and that are rounded to bfloat16: off by 0.0111
        # after 3 tokens (CPU) and after 16 (H200, measured). Chunks round states too.
        allowed=ROUNDED_BACK,
    )


def _named(kernel: bool, on_gpu: bool, otherwise: str = "XLA") -> str:
    return ("pallas" if on_gpu else "pallas, interpreted") if kernel else otherwise


_MAKERS = {
    Paged: _paged,
    Whole: _whole,
    Meeting: _meeting,
    Grouped: _grouped,
    EightBit: _eight_bit,
    FewBits: _few_bits,
    FewBitsExperts: _few_bits_experts,
    Held8: _held_8,
    Recurrent: _recurrent,
}
