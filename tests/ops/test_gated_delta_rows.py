"""The kernels of the gated delta rule for GPUs, interpreted, against the rule as it is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import gated_delta_kernel
from shardlm.ops.gated_delta import CHUNK, gated_delta, in_chunks, reference, unit
from shardlm.ops.gated_delta_rows import delta_rows, gradients_by_kernel, kept_outputs_by_kernel, outputs_by_kernel
from shardlm.ops.short_conv import texts

B, K, N, H, V = 2, 2, 4, 16, 32


def numbers(length: int, spread: float = 1.0, N: int = N, K: int = K, H: int = H, V: int = V) -> tuple[jax.Array, ...]:
    """Queries and keys that lie so far from one of each head, values, slow decays, betas, and a state."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 1, K, H)) + spread * rng.normal(size=(B, length, K, H)) for _ in range(2))
    near = [unit(jnp.asarray(q)), unit(jnp.asarray(k)), rng.normal(size=(B, length, N, V))]
    wide = -np.exp(rng.normal(size=(B, length, N)) - 4), rng.uniform(size=(B, length, N)), rng.normal(size=(B, N, H, V))
    return *(jnp.asarray(a, jnp.bfloat16) for a in near), *(jnp.asarray(a, jnp.float32) for a in wide)


def asked_of(length: int, N: int = N, K: int = K, H: int = H, V: int = V) -> tuple[jax.Array, jax.Array]:
    """Gradients of outputs and of the state."""
    rng = np.random.default_rng(1)
    out, state = rng.normal(size=(B, length, N, V)), rng.normal(size=(B, N, H, V))
    return jnp.asarray(out, jnp.bfloat16), jnp.asarray(state, jnp.float32)


def texts_of(length: int) -> jax.Array:
    places = jnp.array([0, 20, CHUNK - 1, CHUNK, 2 * CHUNK + 40, length - 3])
    return texts(jnp.zeros((B, length), bool).at[1, places].set(True, mode="drop"))


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(rule, given, asked, text) -> tuple[jax.Array, ...]:
    """Outputs, the state, and gradients of all that is given."""
    made, back = jax.vjp(lambda *a: rule(*a, text), *given)
    return *made, *back(asked)


@jax.jit
def by_kernels(given, asked, text) -> tuple[jax.Array, ...]:
    *made, kept = kept_outputs_by_kernel(CHUNK, *given, text, interpret=True)
    return *made, *gradients_by_kernel(CHUNK, kept, *given, text, *asked, interpret=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("length", "spread"), [(33, 1.0), (CHUNK, 1.0), (3 * CHUNK + 20, 0.3), (3 * CHUNK + 20, 3.0)])
def test_the_kernels_for_gpus_are_the_rule(length, spread):
    """A row that goes on from its state to the end and one in which texts begin, also within a block of the inverse and
    at a chunk's end: outputs, the state, and all gradients. With factors of 16 bits, against float32: no further from
    it than XLA's products, of which XLA:CPU rounds fewer (what it fuses stays in 32 bits)."""
    text = texts_of(length)
    given, asked = numbers(length, spread), asked_of(length)
    assert gated_delta_kernel.fits(given[0], given[2], CHUNK)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (given, asked))
    made = [with_gradients(rule, *of, text) for rule, of in ((gated_delta, (given, asked)), (reference, wide))]
    for found, other, wanted in zip(by_kernels(given, asked, text), *made, strict=True):
        assert found.shape == wanted.shape and found.dtype == other.dtype
        error, usual = (np.linalg.norm(np.asarray(a - wanted, np.float64)) for a in (found, other))
        assert error < 0.012 * np.linalg.norm(wanted)  # measured: up to 0.0086, of beta, and 0.0068
        assert error < 1.25 * usual  # measured: up to 1.17


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "key_heads", "width", "values"), [(4, 1, 128, 128), (2, 2, 128, 64)])
def test_heads_as_wide_as_qwens(heads, key_heads, width, values):
    """[128, 128], which several programs go over, and several heads of values for one of keys; and one each."""
    sizes = {"N": heads, "K": key_heads, "H": width, "V": values}
    given, asked, text = numbers(CHUNK + 9, **sizes), asked_of(CHUNK + 9, **sizes), texts_of(CHUNK + 9)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (given, asked))
    for found, wanted in zip(by_kernels(given, asked, text), with_gradients(reference, *wide, text), strict=True):
        assert np.linalg.norm(np.asarray(found - wanted, np.float64)) < 0.015 * np.linalg.norm(wanted)


def test_a_forward_pass_is_the_same_with_gradients_and_without():
    """Bit for bit: what evaluation or a preference's reference computes is what training does."""
    given, text = numbers(CHUNK + 9), texts_of(CHUNK + 9)
    alone = jax.jit(functools.partial(outputs_by_kernel, CHUNK, interpret=True))(*given, text)
    *found, kept = jax.jit(functools.partial(kept_outputs_by_kernel, CHUNK, interpret=True))(*given, text)
    jax.tree.map(np.testing.assert_array_equal, tuple(found), alone)
    assert sum(a.nbytes for a in kept) == 2 * B * 2 * CHUNK * N * (CHUNK + V + H * V // CHUNK)


def test_the_inverse_in_a_kernel():
    """Of equal keys, of which sums of powers would make numbers of 1e18, and of others: right to 14 bits and more, of
    which 8 are kept."""
    rng = np.random.default_rng(0)
    for lower in (np.ones((64, 64)), rng.uniform(-1, 1, size=(64, 64)) / 4, rng.normal(size=(32, 32)) / 8):
        lower = np.tril(lower, -1)
        found = jax.jit(gated_delta_kernel.inverse_of_unit)(lower.astype(np.float32))
        wanted = np.linalg.inv(np.eye(len(lower)) + lower)
        np.testing.assert_allclose(found, wanted, atol=2.0**-14 * np.abs(wanted).max())


def test_elsewhere_gradients_are_those_of_xlas_products():
    """Bit for bit, where there is no GPU."""
    given, text = numbers(CHUNK + 9), jnp.zeros((B, CHUNK + 9), jnp.int32)
    rule = functools.partial(in_chunks, CHUNK, True)

    def gradients(rule):
        def loss(*given):
            out, state = rule(*given, text)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.sin(state))

        return jax.jit(jax.value_and_grad(loss, argnums=range(6)))(*given)

    found = gradients(functools.partial(delta_rows, rule, CHUNK))
    jax.tree.map(np.testing.assert_array_equal, found, gradients(rule))


def test_what_has_no_kernel():
    """Rows that are shorter than a chunk, numbers of 32 bits, keys that leave no registers, and heads that are no whole
    tiles."""
    sizes = lambda K, width, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((B, 100, K, width), dtype)  # noqa: E731
    q, v = sizes(K, H), sizes(N, V)
    assert gated_delta_kernel.fits(q, v, CHUNK) and not gated_delta_kernel.fits(q, v, CHUNK // 2)
    assert not gated_delta_kernel.fits(sizes(K, H, jnp.float32), sizes(N, V, jnp.float32), CHUNK)
    assert not gated_delta_kernel.fits(sizes(K, 256), v, CHUNK)
    assert not gated_delta_kernel.fits(q, sizes(N, 48), CHUNK)
