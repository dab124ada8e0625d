"""The kernels of GPUs beside their references: what runs for each shape of kernel_cases.py, and what it takes. On a CPU
the kernels that it has stand in: Pallas interpreted, XLA's attention, blocked matmuls."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.bench import image_kernels, recurrent_kernels, weight_kernels
from shardlm.bench.attention_in_turns import in_turns
from shardlm.bench.kernel import (
    EIGHT_BITS,
    ROUNDED,
    ROUNDED_BACK,
    Arrays,
    Kernel,
    local,
    named,
    nbytes_of,
    normal,
    with_back,
)
from shardlm.bench.kernel_cases import (
    PAGE,
    EightBit,
    FewBits,
    FewBitsExperts,
    Grouped,
    Held8,
    LayerProducts,
    Looked,
    Meeting,
    Paged,
    Recurrent,
    Rotations,
    Shape,
    Whole,
)
from shardlm.bench.rotations import rotations
from shardlm.flops import attention_pairs
from shardlm.mesh import MeshSpec
from shardlm.ops import attention, attention_pair, grouped_matmul, paged_attention
from shardlm.ops.attention_pair import Pair, Side
from shardlm.ops.chunk_attention import in_parts
from shardlm.ops.kv_format import packed, unpacked
from shardlm.ops.paged_kernel import pallas
from shardlm.ops.quantized_matmul import quantized_einsum
from shardlm.rules import Rules


def kernel_of(shape: Shape, on_gpu: bool) -> Kernel:
    """What is measured at a shape."""
    return _MAKERS[type(shape)](shape, on_gpu)


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
    )


def _recurrent(s: Recurrent, on_gpu: bool) -> Kernel:
    run, reference = recurrent_kernels.served(s, on_gpu) if s.served else recurrent_kernels.in_chunks(s)
    flops, nbytes = recurrent_kernels.least(s)
    return Kernel(
        what=named(s.served, on_gpu, "in chunks"),
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


_MAKERS = {
    Paged: _paged,
    Whole: _whole,
    Meeting: _meeting,
    Grouped: _grouped,
    EightBit: _eight_bit,
    LayerProducts: weight_kernels.products_of_layer,
    Rotations: rotations,
    FewBits: weight_kernels.few_bits,
    FewBitsExperts: weight_kernels.few_bits_experts,
    Held8: weight_kernels.held_8,
    Recurrent: _recurrent,
    Looked: image_kernels.looked,
}
