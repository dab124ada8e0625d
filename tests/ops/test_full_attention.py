"""Attention in both directions, in blocks against the reference, and the reference against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import full_attention as op
from shardlm.ops import window_attention


def made(P=48, N=2, H=8):
    return jax.random.normal(jax.random.key(0), (3, P, N, H))


@pytest.mark.parametrize("count", [48, 31, 1])
def test_blocks_are_the_reference(monkeypatch, count):
    q, k, v = made()
    expected = op.reference(q, k, v, 0.3, jnp.int32(count))[:count]
    monkeypatch.setattr(op, "BLOCK_BYTES", 4 * 48 * 2 * 7)  # of at most 7 queries, which 6 divides
    assert op._block(48, 2) == 6
    found = jax.jit(op.full_attention, static_argnums=3)(q, k, v, 0.3, jnp.int32(count))[:count]
    np.testing.assert_allclose(found, expected, atol=1e-6)


# Of each window how many patches; the last ones go on into padding.
WINDOWS = {"even": [8] * 6, "uneven": [5, 8, 1, 7, 8, 8, 3, 6, 2], "long": [8, 8, 40], "one": [8]}


@pytest.mark.parametrize("longest", [8, 40])
@pytest.mark.parametrize("at_once", [1, 2**27])
@pytest.mark.parametrize("sizes", WINDOWS)
def test_windows_are_the_reference(monkeypatch, sizes, at_once, longest):
    """Blocks of them too where there is but one, or two that a window is parted by."""
    monkeypatch.setattr(window_attention, "AT_ONCE_BYTES", at_once)
    count = min(sum(WINDOWS[sizes]), 45)
    longest = max(longest, *WINDOWS[sizes])
    q, k, v = made()
    numbers = np.zeros(48, np.int32)  # of padding: as pictures are padded
    numbers[:count] = np.repeat(np.arange(len(WINDOWS[sizes])), WINDOWS[sizes])[:count]
    expected = op.reference(q, k, v, 0.3, jnp.int32(count), numbers)[:count]
    run = jax.jit(window_attention.window_attention, static_argnums=(3, 6))
    found = run(q, k, v, 0.3, jnp.int32(count), numbers, longest)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:count], expected, atol=1e-6)


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
