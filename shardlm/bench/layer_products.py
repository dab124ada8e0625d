"""The projections of a decoder's layer for few tokens, with the norms before them and the gate: by the kernels that
have these in them (ops/few_rows.py), or by XLA."""

import jax
import jax.numpy as jnp

from shardlm.bench.kernel_cases import LayerProducts
from shardlm.ops import few_rows
from shardlm.ops.few_rows import Norm
from shardlm.ops.norm import rms_norm
from shardlm.ops.swiglu import activate

EPS = 1e-5
Arrays = tuple[jax.Array, ...]


def shapes(s: LayerProducts) -> list[tuple[int, int]]:
    """Of wq, wk, wv, wo, gate, up and down."""
    kv = s.kv_heads * s.width // s.heads
    D, F = s.width, s.hidden
    return [(D, D), (D, kv), (D, kv), (D, D), (D, F), (D, F), (F, D)]


def inputs_of(s: LayerProducts, key: jax.Array) -> Arrays:
    """x, the scales of two norms, and the weights; products are of the size of what is multiplied."""
    keys = jax.random.split(key, 10)
    arrays = [(s.rows, s.width), (s.width,), (s.width,), *shapes(s)]
    x, first, second, *weights = (jax.random.normal(*of, jnp.bfloat16) for of in zip(keys, arrays, strict=True))
    return x, first, second, *(w * w.shape[0] ** -0.5 for w in weights)


def by_kernels(x: jax.Array, first, second, wq, wk, wv, wo, gate, up, down, interpret: bool) -> Arrays:
    """(x behind both residuals, keys, values); queries stand for what attention would give."""
    run = {"interpret": interpret}
    q, k, v = few_rows.products(x, (wq, wk, wv), Norm(first, EPS), **run)
    x = x + few_rows.products(q, (wo,), **run)[0]
    hidden = few_rows.gated(x, gate, up, "silu", Norm(second, EPS), **run)
    return x + few_rows.products(hidden, (down,), **run)[0], k, v


def plainly(x: jax.Array, first, second, wq, wk, wv, wo, gate, up, down) -> Arrays:
    """The same, as layers say it."""
    read = rms_norm(x, first, EPS)
    q, k, v = (read @ w for w in (wq, wk, wv))
    x = x + q @ wo
    read = rms_norm(x, second, EPS)
    return x + (activate(read @ gate, "silu") * (read @ up)) @ down, k, v
