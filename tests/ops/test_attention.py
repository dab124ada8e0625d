"""Attention and rotary embedding against plain numpy, and the choice of implementation."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from small import relative_error

from shardlm.ops.attention import attend, choose, reference
from shardlm.ops.blocked_attention import blocked_attention
from shardlm.ops.cudnn_heads import traced_for
from shardlm.ops.rope import Rope, Sines, rope, sines
from shardlm.ops.swiglu import swiglu


def test_packed_attention_is_attention_on_each_document_alone():
    rng = np.random.default_rng(0)
    T, N, K, H = 12, 6, 3, 8
    q, k, v = (rng.standard_normal((1, T, heads, H)).astype(np.float32) for heads in (N, K, K))
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3], np.int32)
    out = np.asarray(reference(q, k, v, segments, scale=H**-0.5))
    for document in (slice(0, 5), slice(5, 9)):
        for head in range(N):
            scores = q[0, document, head] @ k[0, document, head // (N // K)].T * H**-0.5
            scores[np.triu_indices(len(scores), 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            expected = weights @ v[0, document, head // (N // K)]
            np.testing.assert_allclose(out[0, document, head], expected, atol=1e-5)
    assert np.isfinite(out).all()


def test_rope_depends_on_relative_position_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 16)).astype(np.float32)

    def score(at_q, at_k):
        turn = [rope(x, jnp.array([[at]]), Rope()) for x, at in ((q, at_q), (k, at_k))]
        return float(jnp.vdot(*turn))

    np.testing.assert_allclose(score(3, 1), score(1003, 1001), rtol=1e-3)
    np.testing.assert_allclose(score(0, 0), float(np.vdot(q, k)), rtol=1e-5)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_rope_rotates_by_the_stated_angle():
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., 0] = 1.0
    turned = np.asarray(rope(x, jnp.array([[2]]), Rope(100.0)))[0, 0, 0]
    np.testing.assert_allclose(turned, [np.cos(2.0), 0, np.sin(2.0), 0], atol=1e-6)
    x = np.eye(4, dtype=np.float32)[1][None, None, None]
    turned = np.asarray(rope(x, jnp.array([[2]]), Rope(100.0)))[0, 0, 0]
    np.testing.assert_allclose(turned, [0, np.cos(0.2), 0, np.sin(0.2)], atol=1e-6)


@pytest.mark.parametrize(
    "platform,capability,dtype,head_dim,value_dim,expected",
    [
        ("cpu", None, jnp.float32, 64, 64, "xla"),
        ("gpu", "8.0", jnp.bfloat16, 128, 128, "cudnn"),
        ("cuda", "9.0", jnp.float32, 128, 128, "xla"),
        ("gpu", "9.0", jnp.bfloat16, 100, 100, "xla"),
        ("gpu", "9.0", jnp.bfloat16, 512, 512, "xla"),
        ("gpu", "8.9", jnp.bfloat16, 192, 128, "xla"),
        ("gpu", "9.0", jnp.bfloat16, 192, 128, "cudnn"),
        ("gpu", "10.0", jnp.bfloat16, 192, 128, "cudnn"),
        ("gpu", "12.0", jnp.bfloat16, 192, 128, "xla"),
        ("gpu", "9.0", jnp.bfloat16, 256, 256, "cudnn"),
        ("gpu", "10.3", jnp.bfloat16, 256, 256, "xla"),
        ("gpu", "10.0", jnp.bfloat16, 192, 192, "xla"),
    ],
)
def test_choice(platform, capability, dtype, head_dim, value_dim, expected):
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    heads = {(64, 64), (head_dim, value_dim)}
    assert choose("auto", device, dtype, heads) == expected
    assert choose("cudnn", device, dtype, heads) == "cudnn"
    if capability == "10.3":  # without gradients it takes them
        assert choose("auto", device, dtype, heads, trained=False) == "cudnn"


def test_jax_asks_the_gpu_that_a_program_is_for():
    query = jax.ShapeDtypeStruct((1, 128, 2, 192), jnp.bfloat16)
    asked = functools.partial(jax_cudnn.check_is_flash_attention, query, query, query, 0, 91300, False, True)
    own = jax_cudnn.check_compute_capability, jax_cudnn.is_cuda_compute_capability_equal
    with traced_for(types.SimpleNamespace(compute_capability="9.0")):
        asked()
    for capability in ("8.9", None):
        older = traced_for(types.SimpleNamespace(compute_capability=capability))
        with older, pytest.raises(NotImplementedError, match="must be <= 128"):
            asked()
    assert own == (jax_cudnn.check_compute_capability, jax_cudnn.is_cuda_compute_capability_equal)


def compiled_with_gradients(function, cotangent, q, k, v, segments, **options):
    """(out, (d_q, d_k, d_v)) of one program; `cotangent` is made of out."""

    def run(q, k, v, segments):
        out, pull = jax.vjp(lambda q, k, v: function(q, k, v, segments, **options), q, k, v)
        return out, pull(cotangent(out))

    return jax.jit(run)(q, k, v, segments)


@pytest.mark.parametrize("T", [7, 128, 512])
@pytest.mark.parametrize("N,K", [(4, 4), (6, 2), (4, 1)])
def test_blocked_attention_equals_the_reference(T, N, K):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, T, heads, 8)).astype(np.float32) for heads in (N, K, K))
    segments = np.sort(rng.integers(1, 4, (2, T)), axis=1).astype(np.int32)
    segments[:, T - T // 5 :] = 0

    def outcome(function):
        return compiled_with_gradients(function, jnp.cos, q, k, v, segments, scale=8**-0.5)

    # The same float32 sums in another order (measured: up to 9e-7).
    assert relative_error(outcome(blocked_attention), outcome(reference)) < 1e-5


def test_swiglu_gradient():
    gate, up = np.random.default_rng(0).standard_normal((2, 5, 7)).astype(np.float32)
    plain = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
    out, pull = jax.vjp(swiglu, gate, up)
    expected, pull_plain = jax.vjp(plain, gate, up)
    assert relative_error((out, pull(out)), (expected, pull_plain(out))) < 1e-6


@pytest.mark.parametrize("window", [3, 70, 200])
def test_a_window_hides_what_is_further_back(window):
    q, k, v, d_out = (jax.random.normal(jax.random.key(i), (1, 256, n, 8)) for i, n in enumerate((4, 2, 2, 4)))
    segments = jnp.repeat(jnp.array([[1, 2]]), jnp.array([100, 156]), axis=1, total_repeat_length=256)

    def outcome(function):
        return compiled_with_gradients(function, lambda _: d_out, q, k, v, segments, scale=0.3, window=window)

    # float32, sums in another order (measured: 1e-6)
    assert relative_error(outcome(blocked_attention), outcome(reference)) < 1e-5
    np.testing.assert_allclose(reference(q, k, v, segments, 0.3, window=1), jnp.repeat(v, 2, axis=2), rtol=1e-6)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 2.0)])
def test_tokens_of_an_image_see_those_after_them(window, softcap):
    """Of an image over the end of a block of queries, one that is longer than the window, and one in another row."""
    q, k, v, d_out = (jax.random.normal(jax.random.key(i), (2, 256, n, 8)) for i, n in enumerate((4, 2, 2, 4)))
    segments = jnp.repeat(jnp.array([[1, 2]] * 2), jnp.array([100, 156]), axis=1, total_repeat_length=256)
    until = np.tile(np.arange(256), (2, 1))
    for row, first, end in (0, 40, 99), (0, 110, 200), (1, 3, 9):
        until[row, first:end] = end - 1
    places, index = np.arange(256)[:, None], np.arange(256)[None]
    seen = (index <= until[:, :, None]) & (places - index < (window or 256))
    seen = jnp.asarray(seen) & (segments[:, :, None] == segments[:, None])

    def expected(q, k, v, segments):
        return attend(q, k, v, seen, 0.3, softcap)

    def found(q, k, v, segments):
        how = {"scale": 0.3, "window": window, "softcap": softcap}
        return blocked_attention(q, k, v, segments, until=jnp.asarray(until, jnp.int32), **how)

    both = (compiled_with_gradients(run, lambda _: d_out, q, k, v, segments) for run in (found, expected))
    assert relative_error(*both) < 1e-5  # float32, sums in another order


@pytest.mark.parametrize("dim", [0, 12, 10])  # of 16; 10: 5 frequencies, which have no halves
def test_sines_of_a_step_are_those_of_its_layers(dim):
    turned, other = Rope(dim=dim, axes=(0, 1, 2) * 2 if dim == 12 else ()), Rope(theta=100.0)
    positions = jnp.arange(24).reshape((2, 4, 3)) if dim == 12 else jnp.arange(8).reshape((2, 4))
    made = jax.jit(Sines.of, static_argnums=0)(((turned, 16), (other, 8)), positions)
    for own, width in ((turned, 16), (other, 8)):
        for found, expected in zip(made.get(own, width), sines(positions, own, width), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-6)
    assert made.get(other, 16) is None
