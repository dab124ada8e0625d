"""Norms: the numbers, the gradients against autodiff of the same formulas, and what is kept for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import relative_error

from shardlm.ops.norm import layer_norm, rms_norm

EPS = 1e-5


def plain_rms(x, scale):
    return (x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS)) * scale


def plain_layer(x, scale, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + EPS) * scale + bias


def test_rms_norm_in_float32_inside():
    x = np.array([[3.0, 4.0]], np.float32)
    np.testing.assert_allclose(rms_norm(x, np.array([1.0, 2.0]), 0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-6)
    large = jnp.full((1, 4), 60_000.0, jnp.float16)  # squares overflow float16
    np.testing.assert_allclose(np.asarray(rms_norm(large, jnp.ones(4), EPS), np.float32), 1.0, rtol=1e-3)


@pytest.mark.parametrize("norm,plain,numbers_a_row", [(rms_norm, plain_rms, 1), (layer_norm, plain_layer, 2)])
@pytest.mark.parametrize("dtype,tolerance", [("float32", 2e-6), ("bfloat16", 2**-8)])
def test_gradients_are_autodiffs_and_little_is_kept(norm, plain, numbers_a_row, dtype, tolerance):
    rng = np.random.default_rng(0)
    shape = (3, 5, 64)
    x = jnp.asarray(2 + 3 * rng.standard_normal(shape), dtype)
    vectors = [jnp.asarray(1 + rng.standard_normal(64), dtype) for _ in range(numbers_a_row)]  # scale, and a bias
    d_out = jnp.asarray(rng.standard_normal(shape), dtype)

    out, back = jax.vjp(lambda *args: norm(*args, EPS), x, *vectors)
    expected, oracle = jax.vjp(plain, *(a.astype(jnp.float32) for a in (x, *vectors)))
    assert out.dtype == x.dtype
    assert relative_error(np.asarray(out, np.float32), np.asarray(expected)) < tolerance
    for ours, theirs, given in zip(back(d_out), oracle(d_out.astype(jnp.float32)), (x, *vectors), strict=True):
        assert ours.dtype == given.dtype
        assert relative_error(np.asarray(ours, np.float32), np.asarray(theirs)) < tolerance

    kept = jax.tree.leaves(back)
    assert sum(a.nbytes for a in kept) == x.nbytes + sum(v.nbytes for v in vectors) + 15 * 4 * numbers_a_row
