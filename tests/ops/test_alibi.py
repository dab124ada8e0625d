"""Attention with linear biases (ops/alibi.py) against biases that are added to scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.ops.alibi import DIMS, slopes, slopes_above, with_positions, with_slopes
from shardlm.ops.attention import attend

N, H, T = 6, 16, 300
SCALE = H**-0.5


def test_slopes_are_those_of_the_paper_and_of_both_ways_for_other_numbers_of_heads():
    assert slopes(8) == slopes_above(8) == tuple(2.0**-i for i in range(1, 9))
    assert slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)  # build_alibi_tensor of transformers' BLOOM
    assert slopes_above(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)  # build_mpt_alibi_tensor
    assert slopes_above(12, 4.0) != slopes_above(12)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 2e-5), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("first", [0, 70_000])
def test_biases_are_those_that_are_added(dtype, close, first):
    """Far from the beginning too: positions lose nothing, and what scores of float32 lose is the sum's, of 140,000
    there (6e-3 measured). The rest of bfloat16 is its weights' and values' rounding."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, T, N, H)).astype(dtype) for i in range(3))
    positions = first + jnp.arange(T)[None]
    seen = jnp.tril(jnp.ones((T, T), bool))[None]
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        made = with_slopes(q, slopes(N), SCALE), with_positions(k, positions)
        found = np.asarray(attend(*made, v, seen, SCALE).astype(jnp.float32))
    assert made[0].shape == made[1].shape == (1, T, N, H + DIMS)
    scores = np.einsum("btnh,bsnh->bnts", *(np.asarray(a, np.float64) for a in (q, k))) * SCALE
    scores -= np.float64(slopes(N))[:, None, None] * (np.arange(T)[:, None] - np.arange(T))
    weights = np.exp(np.where(np.asarray(seen)[:, None], scores, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh->btnh", weights, np.asarray(v, np.float64))
    np.testing.assert_allclose(found, expected, atol=max(close, 2e-7 * first))


def test_slopes_that_do_not_fit_are_refused():
    with pytest.raises(ShardlmError, match=r"1 slopes of linear biases with num_heads=4, scale=0\.5, .* one a head"):
        AttentionConfig.with_slopes(4, 4, 8, (0.5,), scale=0.5)
    with pytest.raises(ShardlmError, match=r"scale=0\.0"):
        AttentionConfig.with_slopes(4, 4, 8, slopes(4))
