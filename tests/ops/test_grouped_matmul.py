"""Matmuls of groups of rows: every implementation against the dense reference."""

import importlib.metadata
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.errors import ShardlmError
from shardlm.ops import grouped_matmul as grouped_matmul_module
from shardlm.ops.grouped_matmul import choose, grouped_matmul, reference

# Groups: even, uneven with empty ones, one that has all, rows beyond the last group, none at all.
SIZES = [(8, 8, 8, 8), (0, 21, 1, 10), (32, 0, 0, 0), (3, 0, 5, 2), (0, 0, 0, 0)]


@pytest.fixture(scope="module")
def arrays():
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(32, 6), (4, 6, 10), (32, 10)]))
    return x, w, dy


def with_gradients(f, arrays, sizes):
    x, w, dy = arrays
    y, back = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
    return y, *back(dy)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocked_equals_the_reference(arrays, sizes):
    sizes = jnp.array(sizes, jnp.int32)
    got = jax.jit(lambda a: with_gradients(lambda *b: grouped_matmul(*b, implementation="blocked"), a, sizes))(arrays)
    expected = with_gradients(reference, arrays, sizes)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)  # float32, sums in another order; measured 4e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_parts(arrays, dtype, monkeypatch):
    monkeypatch.setattr(grouped_matmul_module, "PART", 20)  # of weights of 60 numbers
    sizes, arrays = jnp.array(SIZES[1], jnp.int32), tuple(a.astype(dtype) for a in arrays)
    got = jax.jit(lambda a: with_gradients(lambda *b: grouped_matmul(*b, implementation="blocked"), a, sizes))(arrays)
    for a, b in zip(got, with_gradients(reference, arrays, sizes), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(*(x.astype("float32") for x in (a, b)), atol=2e-5 if dtype == "float32" else 0.1)


def test_what_is_no_number_stays_with_its_group():
    """Of a weight without rows it is nobody's; rows of a block that are the next group's are not its own."""
    x, w = jnp.ones((32, 6)), jnp.ones((4, 6, 10)).at[jnp.array([0, 2])].set(jnp.nan)
    found = grouped_matmul(x, w, jnp.array([0, 16, 3, 13], jnp.int32), implementation="blocked")
    assert np.array_equal(np.isnan(found).all(axis=1), (np.arange(32) >= 16) & (np.arange(32) < 19))
    assert np.array_equal(found[19:], np.full((13, 10), 6.0)) and np.array_equal(found[:16], np.full((16, 10), 6.0))


def test_many_rows_and_blocks():
    sizes = jnp.array([300, 7, 0, 129, 64], jnp.int32)
    arrays = tuple(jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(512, 8), (5, 8, 8), (512, 8)]))
    got = with_gradients(lambda *b: grouped_matmul(*b, implementation="blocked"), arrays, sizes)
    for a, b in zip(got, with_gradients(reference, arrays, sizes), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)  # sums of 300 products; measured 3e-5


def test_the_choice(monkeypatch):
    assert choose("cpu") == "blocked"
    for version, fault in (("0.0.14", ""), ("0.0.15", "is 0.0.15: below 0.0.15 is needed"), (None, "is not installed")):
        found = importlib.metadata.PackageNotFoundError() if version is None else None
        monkeypatch.setattr(importlib.metadata, "version", mock.Mock(return_value=version, side_effect=found))
        if not fault:
            assert choose("cuda") == "tokamax"
            continue
        with pytest.raises(ShardlmError, match=rf"{re.escape(fault)}; pip install 'shardlm\[experts\]'"):
            choose("cuda")
