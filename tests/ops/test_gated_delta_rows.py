"""The kernels of the gated delta rule for GPUs, interpreted, against the rule as it is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import gated_delta_kernel, gated_delta_rows
from shardlm.ops.gated_delta import CHUNK, delta_net, empty_memory, gated_delta, reference, unit
from shardlm.ops.gated_delta_rows import delta_rows, outputs_by_kernel
from shardlm.ops.short_conv import texts

B, K, N, H, V = 2, 2, 4, 16, 32


def numbers(length: int, spread: float = 1.0) -> tuple[jax.Array, ...]:
    """Queries and keys that are near each other, by less `spread` the nearer, values, decays of which hardly anything
    is lost, betas, and a state."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 1, K, H)) + spread * rng.normal(size=(B, length, K, H)) for _ in range(2))
    near = [unit(jnp.asarray(q)), unit(jnp.asarray(k)), rng.normal(size=(B, length, N, V))]
    wide = -np.exp(rng.normal(size=(B, length, N)) - 4), rng.uniform(size=(B, length, N)), rng.normal(size=(B, N, H, V))
    return *(jnp.asarray(a, jnp.bfloat16) for a in near), *(jnp.asarray(a, jnp.float32) for a in wide)


def of(rule, given, text):
    return jax.jit(rule)(*given, text)


by_kernels = functools.partial(outputs_by_kernel, CHUNK, interpret=True)


@pytest.mark.parametrize(("length", "spread"), [(33, 1.0), (CHUNK, 1.0), (3 * CHUNK + 20, 0.3), (3 * CHUNK + 20, 3.0)])
def test_the_kernels_for_gpus_are_the_rule(length, spread):
    """A row that goes on from its state to the end and one in which texts begin, also within a block of the inverse and
    at a chunk's end. With factors of 16 bits, against float32: no further from it than XLA's products."""
    places = jnp.array([0, 20, CHUNK - 1, CHUNK, 2 * CHUNK + 40, length - 3])
    text = texts(jnp.zeros((B, length), bool).at[1, places].set(True, mode="drop"))
    given = numbers(length, spread)
    assert gated_delta_kernel.fits(given[0], given[2], CHUNK)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), given)
    expected, near_it = of(reference, wide, text), of(gated_delta, given, text)
    for found, other, wanted in zip(of(by_kernels, given, text), near_it, expected, strict=True):
        assert found.shape == wanted.shape and found.dtype == other.dtype
        error, usual = (np.linalg.norm(np.asarray(a - wanted, np.float64)) for a in (found, other))
        assert error < 0.02 * np.linalg.norm(wanted)
        assert error < 1.2 * usual
