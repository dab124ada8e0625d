"""The kernels of Mamba 2 for GPUs, interpreted, against the rule as it is written."""

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.ops import summed_kernel, summed_sizes
from shardlm.ops.gated_delta import SUMMED, gated_delta, reference
from shardlm.ops.short_conv import texts
from shardlm.ops.summed_rows import gradients_by_kernel, outputs_by_kernel

B, T, K, N, H, V = 2, SUMMED + 70, 2, 8, 16, 32  # the last chunk is not full


def test_the_kernels_for_gpus_are_the_rule(monkeypatch):
    """A row that goes on from its state and one in which texts begin, of heads that two programs sum. With factors of
    16 bits, against float32: no further from it than XLA's products."""
    monkeypatch.setattr(summed_sizes, "HEADS", 2)
    rng = np.random.default_rng(0)
    new = jnp.zeros((B, T), bool).at[1, jnp.array([20, SUMMED - 3, SUMMED + 66])].set(True)
    near = [(B, T, K, H), (B, T, K, H), (B, T, N, V)]
    q, k, v, d_out = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in (*near, near[-1]))
    state, d_state = (jnp.asarray(rng.normal(size=(B, N, H, V)), jnp.float32) for _ in range(2))
    beta = jnp.asarray(rng.uniform(size=(B, T, N)), jnp.float32)
    given, text = (q, k, v, -0.3 * beta, beta, state), texts(new)
    assert summed_kernel.fits(q, v, SUMMED)

    def of(rule, given, asked):
        @jax.jit
        def run(given, asked):
            made, back = jax.vjp(lambda *a: rule(*a, text, takes_back=False), *given)
            return (*made, *back(asked))

        return run(given, asked)

    @jax.jit
    def by_kernels(given, asked):
        made = outputs_by_kernel(SUMMED, *given, text, interpret=True)
        return (*made, *gradients_by_kernel(SUMMED, *given, text, *asked, interpret=True))

    asked = d_out, d_state
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (given, asked))
    expected, near_it = of(reference, *wide), of(gated_delta, given, asked)
    for found, other, wanted in zip(by_kernels(given, asked), near_it, expected, strict=True):
        assert found.shape == wanted.shape and found.dtype == other.dtype
        error, usual = (np.linalg.norm(np.asarray(a - wanted, np.float64)) for a in (found, other))
        assert error < 0.004 * np.linalg.norm(wanted)  # measured: up to 0.0024
        assert error < 1.2 * usual


def test_what_has_no_kernel():
    """Rows that are shorter than two pieces, numbers of 32 bits, and heads that are no whole tiles."""
    q, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((B, T, K, H), (B, T, N, V)))
    wide = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (q, v)]
    assert summed_kernel.fits(q, v, 64) and not summed_kernel.fits(q, v, 32)
    assert not summed_kernel.fits(*wide, SUMMED)
    assert not summed_kernel.fits(q, jax.ShapeDtypeStruct((B, T, N, 48), jnp.bfloat16), SUMMED)
