"""Matrices whose rows and columns sum to 1, and the kernel for GPUs against what it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from shardlm.ops import sums_of_one_kernel
from shardlm.ops.sums_of_one import gradient, reference, sums_of_one

EPS = 1e-6


def drawn(*shape, seed=0):
    return 3 * jax.random.normal(jax.random.key(seed), shape)


def test_rows_and_columns_sum_to_one():
    made = np.asarray(sums_of_one(drawn(2, 5, 4, 4) / 3, 20, EPS))
    np.testing.assert_allclose(made.sum(-2), 1, atol=1e-5)  # the columns, which are divided last
    np.testing.assert_allclose(made.sum(-1), 1, atol=1e-2)
    assert (made > 0).all()


def test_its_gradient_is_that_of_its_numbers():
    check_grads(lambda a: sums_of_one(a, 3, EPS), (drawn(1, 2, 3, 3),), order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_the_kernel_is_the_reference():
    """Of more tokens than a program has, and not a multiple of them."""
    scores, given, how = drawn(2, 35, 3, 3), drawn(2, 35, 3, 3, seed=1), {"iterations": 3, "eps": EPS}
    made = jax.jit(lambda a: sums_of_one_kernel.pallas(a, interpret=True, **how))(scores)
    np.testing.assert_allclose(made, reference(scores, **how), atol=1e-6)
    back = jax.jit(lambda a, g: sums_of_one_kernel.gradient(a, g, interpret=True, **how))(scores, given)
    expected = gradient(scores, given, **how)
    assert jnp.abs(expected).max() > 0.1
    np.testing.assert_allclose(back, expected, atol=2e-6)
