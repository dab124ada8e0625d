"""Linear attention in chunks against the rule as it is written, and rows that are cut anywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import delta_step_kernel, states_kernel
from shardlm.ops.delta_rows import known_in_place, remembered
from shardlm.ops.gated_delta import CHUNK, SUMMED, delta_net, empty_memory, gated_delta, reference, unit
from shardlm.ops.gated_delta_chunks import through
from shardlm.ops.short_conv import short_conv, texts
from shardlm.ops.unit_inverse import inverse_of_unit

B, K, N, H, V, W = 2, 2, 4, 16, 8, 4


def numbers(length: int, seed: int = 0, channels: bool = False) -> list[jax.Array]:
    """Queries, keys, values, logarithms of decays, of each number of a key if `channels`, and betas of [B, length,
    ...], and a state."""
    rng = np.random.default_rng(seed)
    rates = [(B, length, N, H)[: 3 + channels], (B, length, N)]
    shapes = [(B, length, K, H), (B, length, K, H), (B, length, N, V), *rates, (B, N, H, V)]
    q, k, v, decay, beta, state = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return [unit(jnp.asarray(q)), unit(jnp.asarray(k)), v, -(decay**2), 1 / (1 + np.exp(-beta)), state]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("length", "channels", "takes_back"),
    [(n, channels, True) for n in (1, 5, CHUNK, 2 * CHUNK + 22) for channels in (False, True)]
    + [(n, False, False) for n in (1, 2 * SUMMED + 22)],
)
def test_chunks_are_the_rule(length, channels, takes_back):
    new = np.random.default_rng(1).uniform(size=(B, length)) < 3 / CHUNK
    text = texts(jnp.asarray(new).at[0].set(False))  # a row that goes on from its state to the end
    given = numbers(length, channels=channels)

    def of(rule):
        def loss(*given):
            out, state = rule(*given, text, takes_back=takes_back)
            return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.sin(state)), (out, state)

        return jax.jit(jax.value_and_grad(loss, argnums=range(6), has_aux=True))(*given)

    (_, found), gradients = of(gated_delta)
    (_, expected), wanted = of(reference)
    for a, b in zip([*found, *gradients], [*expected, *wanted], strict=True):
        assert jnp.abs(a - b).max() < 2e-5 * max(1, jnp.abs(b).max())  # measured: up to 2e-6


@pytest.mark.wide
def test_factors_in_16_bits():
    """Of equal keys and hardly any decay, where all that is remembered is read and taken back again and again, against
    the rule in float64: of each array, as a part of its length."""
    rng, T, N, H, V = np.random.default_rng(0), 4 * CHUNK, 4, 32, 32
    q, k = (3 * rng.normal(size=(1, 1, K, H)) + rng.normal(size=(1, T, K, H)) for _ in range(2))
    near = [np.asarray(unit(jnp.asarray(a))) for a in (q, k)] + [rng.normal(size=(1, T, N, V))]
    wide = -np.exp(rng.normal(size=(1, T, N)) - 5), rng.uniform(size=(1, T, N)), rng.normal(size=(1, N, H, V))
    text, like = jnp.zeros((1, T), jnp.int32), rng.normal(size=(1, T, N, V))
    rounded = [jnp.asarray(a, jnp.bfloat16) for a in near]

    def of(rule, narrow, wide_type):
        def loss(*given):
            out, state = rule(*given, text)
            return jnp.sum(out.astype(wide_type) * like), (out, state)

        given = [a.astype(narrow) for a in rounded] + [jnp.asarray(a, wide_type) for a in wide]
        (_, found), gradients = jax.jit(jax.value_and_grad(loss, argnums=range(6), has_aux=True))(*given)
        return [np.asarray(a, np.float64) for a in (*found, *gradients)]

    with jax.enable_x64(True):
        expected = of(reference, jnp.float64, jnp.float64)
    for narrow, bound in ((jnp.bfloat16, 0.03), (jnp.float32, 5e-6)):  # measured: up to 0.008 and 5e-7
        for a, b in zip(of(gated_delta, narrow, jnp.float32), expected, strict=True):
            assert np.linalg.norm(a - b) < bound * np.linalg.norm(b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("back", "decays"), [(False, 1), (True, 1), (False, 32), (True, 32)])
def test_the_kernel_for_gpus_carries_states_as_the_loop_does(back, decays):
    rng, n, H, V = np.random.default_rng(0), 5, 32, 64
    left, P = rng.uniform(size=(n, B, N, decays)).astype(np.float32), rng.normal(size=(n, B, N, H, H)) / H
    into, state = rng.normal(size=(n, B, N, H, V)), rng.normal(size=(B, N, H, V)).astype(np.float32)
    P, into = (jnp.asarray(a, jnp.bfloat16) for a in (P, into))
    assert states_kernel.fits(P, into)
    found = states_kernel.pallas(left, P, into, state, back=back, interpret=True)
    for a, b in zip(found, jax.jit(through, static_argnums=4)(left, P, into, state, back), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), rtol=1e-2, atol=1e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("channels", "takes_back"), [(False, True), (True, True), (False, False)])
def test_the_kernel_for_gpus_steps_where_states_lie(channels, takes_back):
    """A row that begins in a slot another text left, one that goes on, one without a token; other slots stay as they
    are."""
    rng, slots, rows = np.random.default_rng(0), 5, 3
    of = {"q": (K, H), "k": (K, H), "v": (N, V)}
    random = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    x, taps = {n: random(rows, 1, *own) for n, own in of.items()}, {n: random(*own, W) for n, own in of.items()}
    taps |= {} if takes_back else {"skip": random(N), "bias_q": random(K, H)}
    held = {f"conv_{name}": random(slots, W - 1, *own) for name, own in of.items()} | {"state": random(slots, N, H, V)}
    log_decay, beta = -jnp.abs(random(rows, 1, N, *(H,) * channels)), jax.nn.sigmoid(random(rows, 1, N))
    position, valid, slot = jnp.array([0, 7, 9]), jnp.array([[True], [True], [False]]), jnp.array([3, 0, 4])
    given = x, taps, log_decay, beta
    assert delta_step_kernel.fits(x["k"], held["state"])

    def rule(*given, slot, takes_back=True):
        return delta_step_kernel.pallas(*given, slot, takes_back, interpret=True)

    out, found = jax.jit(partial(known_in_place, rule))(*given, position, valid, held, slot)
    wanted, expected = jax.jit(partial(remembered, "known"))(*given, position, position, valid, held, slot)
    np.testing.assert_allclose(out[:2], wanted[:2], atol=1e-5)  # measured: 1e-6
    for name, a in expected.items():
        np.testing.assert_allclose(found[name], a, atol=1e-5)
    np.testing.assert_array_equal(found["state"][jnp.array([1, 2, 4])], held["state"][jnp.array([1, 2, 4])])


def test_what_decays_at_once_is_no_infinity():
    q, k, v, _, beta, state = numbers(CHUNK)
    text = jnp.zeros((B, CHUNK), jnp.int32)
    decay = jnp.where(jnp.arange(CHUNK)[:, None] % 7 == 3, -1e4, -1e-3) * jnp.ones((B, CHUNK, N))

    def loss(rule, v):
        out, after = rule(q, k, v, decay, beta, state, text)
        return jnp.sum(jnp.sin(out)) + jnp.sum(after)

    found, expected = (jax.jit(jax.value_and_grad(partial(loss, rule)))(v) for rule in (gated_delta, reference))
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
    assert np.isfinite(found[0])


@pytest.mark.wide
def test_the_inverse_of_equal_keys():
    """The same key in every token, of which sums of powers would make numbers of 1e18."""
    lower = jnp.tril(jnp.ones((64, 64)), -1)
    np.testing.assert_allclose(inverse_of_unit(lower) @ (jnp.eye(64) + lower), jnp.eye(64), atol=1e-6)


def test_a_convolution_sees_its_own_text():
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 3)).astype(np.float32)
    taps = np.random.default_rng(1).normal(size=(2, 3, W)).astype(np.float32)
    before = np.random.default_rng(2).normal(size=(1, W - 1, 2, 3)).astype(np.float32)
    found = short_conv(x, taps, before, texts(jnp.asarray([[False, False, False, False, True, False]])))
    whole = np.concatenate([before, x], axis=1)[0]
    for t in range(6):
        window = whole[t : t + W].copy()
        window[: {4: W - 1, 5: W - 2}.get(t, 0)] = 0  # nothing from before the new text
        np.testing.assert_allclose(found[0, t], np.einsum("wnh,nhw->nh", window, taps), atol=1e-5)


@pytest.mark.parametrize(
    "cuts",
    [pytest.param((1, 1, 7), marks=pytest.mark.wide), pytest.param((9,), marks=pytest.mark.wide), (2, 6, 1)],
    ids=str,
)
def test_a_text_is_the_same_wherever_it_is_cut(cuts):
    """In pieces with padding behind them, of rows of which one begins new in a place where another text was."""
    rng, length = np.random.default_rng(0), 9
    x = {"q": (K, H), "k": (K, H), "v": (N, V)}
    taps = {name: rng.normal(size=(*shape, W)).astype(np.float32) for name, shape in x.items()}
    x = {name: rng.normal(size=(B, length, *shape)).astype(np.float32) for name, shape in x.items()}
    decay, beta = (-rng.uniform(size=(B, length, N)).astype(np.float32) for _ in range(2))
    whole = np.ones((B, length), bool)
    begins = np.arange(length)[None] == np.zeros((B, 1))
    run = jax.jit(delta_net)
    expected, after = run(x, taps, decay, -beta, empty_memory(x, W), begins, whole)
    memory = jax.tree.map(lambda a: jnp.full_like(a, 7), empty_memory(x, W))  # what another text left
    start, parts = 0, []
    for count in cuts:
        piece = {name: np.pad(a[:, start : start + count], ((0, 0), (0, 3), (0, 0), (0, 0))) for name, a in x.items()}
        rates = [
            np.pad(a[:, start : start + count], ((0, 0), (0, 3), (0, 0)), constant_values=5) for a in (decay, -beta)
        ]
        valid = np.broadcast_to(np.arange(count + 3) < count, (B, count + 3))
        new = valid & (start + np.arange(count + 3) == 0)
        out, memory = run(piece, taps, *rates, memory, new, valid)
        parts.append(out[:, :count])
        start += count
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), memory, after)
    idle = run(piece, taps, *rates, memory, new & False, valid & False)[1]
    jax.tree.map(np.testing.assert_array_equal, idle, memory)  # rows of padding change nothing
