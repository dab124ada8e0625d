"""Zeros that stay in the loop they are made in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops.expert_dispatch import take_back, take_tokens
from shardlm.ops.grouped_matmul import grouped_matmul
from shardlm.ops.or_zero import or_zero, zeros_beside

N, D, LAYERS = 48, 64, 4


def test_zeros_are_where_nothing_is_kept_whatever_was_there():
    a = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, jnp.nan]])
    np.testing.assert_array_equal(or_zero(jnp.array([True, False, True]), a), [[1, 2], [0, 0], [3, np.nan]])
    zeros = zeros_beside(jnp.array([3, 0]), (2, 3), jnp.bfloat16)
    assert zeros.dtype == jnp.bfloat16 and not zeros.astype(bool).any() and zeros.shape == (2, 3)


def rows(x, sizes):
    y = take_tokens(x, jnp.arange(N), jnp.arange(N), 1)
    return take_back(y, jnp.arange(N), jnp.where(jnp.arange(N) < sizes[0], jnp.arange(N), N))


def products(x, sizes):
    return grouped_matmul(x, jnp.ones((1, D, D)), sizes)


@pytest.mark.parametrize("layer", [rows, products])
def test_a_loop_over_layers_carries_no_zeros_as_large_as_its_rows(layer):
    """Only the rows that the forward loop carries are [N, D] of what it takes: constants would be beside them."""

    def loss(x, sizes):
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(layer(x, sizes)), None), x, None, LAYERS)[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((N, D)), jnp.array([N - 5]))
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    large = [v for v in forward.invars if getattr(v.aval, "shape", ()) in ((N, D), (N, 1, D))]
    assert len(large) == 1, large
