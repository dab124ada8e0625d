"""Attention in both directions, in blocks against the reference, and the reference against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import full_attention as op


def made(P=48, N=2, H=8):
    return jax.random.normal(jax.random.key(0), (3, P, N, H))


@pytest.mark.parametrize("count", [48, 31, 1])
@pytest.mark.parametrize("windows", [False, True])
def test_blocks_are_the_reference(monkeypatch, count, windows):
    q, k, v = made()
    numbers = jnp.arange(48) // 5 if windows else None
    expected = op.reference(q, k, v, 0.3, jnp.int32(count), numbers)[:count]
    monkeypatch.setattr(op, "BLOCK_BYTES", 4 * 48 * 2 * 7)  # of at most 7 queries, which 6 divides
    assert op._block(48, 2) == 6
    found = jax.jit(op.full_attention, static_argnums=3)(q, k, v, 0.3, jnp.int32(count), numbers)[:count]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_tiles_are_windows():
    q, k, v = made()
    expected = op.reference(q, k, v, 0.3, jnp.int32(48), jnp.arange(48) // 12)
    np.testing.assert_allclose(op.in_tiles(q, k, v, 0.3, 12), expected, atol=1e-6)


def test_the_reference_is_softmax_over_the_patches_that_there_are():
    q, k, v = (np.asarray(a, np.float64) for a in made(P=6))
    found = op.reference(*made(P=6), 0.5, jnp.int32(4))
    scores = np.exp(np.einsum("qnh,knh->nqk", q, k[:4]) * 0.5)
    expected = np.einsum("nqk,knh->qnh", scores / scores.sum(-1, keepdims=True), v[:4])
    np.testing.assert_allclose(found[:4], expected[:4], atol=1e-5)
