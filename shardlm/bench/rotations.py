"""What the queries, keys and values of few tokens have between their projections and attention over pages, layer after
layer: by one kernel (ops/rotate_write.py), or by XLA."""

import jax
import jax.numpy as jnp

from shardlm.bench.kernel import EIGHT_BITS, ROUNDED, Arrays, Kernel, local, named, nbytes_of
from shardlm.bench.kernel_cases import PAGE, Rotations
from shardlm.ops import rotate_write
from shardlm.ops.few_rows import Norm, Sums
from shardlm.ops.kv_format import SCALE, numbers_of, packed
from shardlm.ops.rope import Rope, sines

SPLITS, EPS = 2, 1e-6  # the parts of a projection of Llama 3 8B
LAYERS = 32  # so that pages, which are made anew in each run, are a small part of it


def rotations(s: Rotations, on_gpu: bool) -> Kernel:
    counts = {"q": s.heads, "k": s.kv_heads, "v": s.kv_heads}
    parts = {name: (SPLITS, s.rows, 1, count, s.width) for name, count in counts.items()}

    def inputs(key: jax.Array) -> Arrays:
        keys = jax.random.split(key, 6)
        sums = (jax.random.normal(k, shape, jnp.float32) for k, shape in zip(keys, parts.values(), strict=False))
        squares = jax.random.uniform(keys[3], (SPLITS, s.rows, 1), minval=1.0, maxval=2.0)
        scales = jax.random.normal(keys[4], (2, s.width), jnp.bfloat16)
        return *sums, squares, scales, jax.random.randint(keys[5], (s.rows, 1), 0, PAGE)

    def layers(step, dtype: jnp.dtype):
        def run(q, k, v, squares, scales, positions):
            sums = {name: Sums(a, squares, s.width, EPS, dtype) for name, a in zip("qkv", (q, k, v), strict=True)}
            norms = {name: Norm(scale, EPS) for name, scale in zip("qk", scales, strict=True)} if s.norms else {}
            made = rotate_write.Unrotated(sums, {}, norms, sines(positions, Rope(), s.width))
            table, valid = 1 + jnp.arange(s.rows, dtype=jnp.int32)[:, None], jnp.ones((s.rows, 1), bool)

            def layer(_, carry):
                pages, _ = carry
                own, pages = jax.lax.optimization_barrier((made, pages))  # or XLA would do once what it does itself
                q, pages = step(own, pages, table, positions, valid, jnp.int32(0))
                return pages, q

            pages, q = jax.lax.fori_loop(0, LAYERS, layer, (_empty(s, dtype), q[0].astype(dtype)))
            return q, [numbers_of(pages[name], pages.get(name + SCALE), dtype) for name in "kv"]

        return local(run)

    def by_kernel(*args):
        return rotate_write.run(*args, interpret=not on_gpu)

    read = nbytes_of(*((shape, "float32") for shape in parts.values()))
    return Kernel(
        what=named(s.fused, on_gpu),
        inputs=inputs,
        run=layers(by_kernel if s.fused else rotate_write.reference, jnp.dtype(jnp.bfloat16)),
        reference=layers(rotate_write.reference, jnp.dtype(jnp.float32)),
        flops=LAYERS * 6 * s.rows * sum(counts.values()) * s.width,
        nbytes=LAYERS * (read + read // (2 * SPLITS)),
        peak="bf16",
        allowed=EIGHT_BITS.get(s.how, ROUNDED),
    )


def _empty(s: Rotations, dtype: jnp.dtype) -> dict[str, jax.Array]:
    """A page for each row, and the scrap page."""
    pages = {name: jnp.zeros((1 + s.rows, PAGE, s.kv_heads, s.width), dtype) for name in "kv"}
    if s.how == "auto":
        return pages
    held = {name: packed(pool, s.how) for name, pool in pages.items()}
    scales = {name + SCALE: scale for name, (_, scale) in held.items() if scale is not None}
    return {name: pool for name, (pool, _) in held.items()} | scales
