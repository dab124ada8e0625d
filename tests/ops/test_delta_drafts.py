"""Linear attention of tokens that may turn out wrong, against rows of the tokens that stayed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import delta_drafts_kernel
from shardlm.ops.delta_drafts import at_once, delta_net_of_drafts, few_tokens
from shardlm.ops.gated_delta import delta_net, empty_memory

B, K, N, H, V, W = 3, 2, 4, 16, 8, 4
STEPS = 12
SHAPES = {"q": (K, H), "k": (K, H), "v": (N, V)}
RUN = jax.jit(delta_net_of_drafts)


def numbers(rng, tokens: int, decays: tuple[int, ...]):
    """x and, as one array each, logarithms of decays, of this shape, and betas."""
    x = {name: rng.normal(size=(B, tokens, *shape)).astype(np.float32) for name, shape in SHAPES.items()}
    decay, beta = (rng.normal(size=(B, tokens, *shape)).astype(np.float32) for shape in (decays, (N,)))
    return x, (-(decay**2) * np.exp(rng.normal(size=decay.shape)).astype(np.float32), 1 / (1 + np.exp(-beta)))


def read(x, taps, rates, memory, at, valid, each: int):
    """A step's tokens, so many at a time: (the outputs, the memory)."""
    out = []
    for i in range(0, valid.shape[1], each):
        some = jax.tree.map(lambda a, i=i: a[:, i : i + each], (x, rates, valid))
        made, memory = RUN(some[0], taps, *some[1], memory, at.astype(np.int32), (at + i).astype(np.int32), some[2])
        out.append(np.asarray(made))
    return np.concatenate(out, axis=1), memory


@pytest.mark.parametrize(
    ("drafts", "one_by_one", "decays", "takes_back"),
    [
        (1, False, (N,), True),
        (4, False, (N,), True),
        (2, True, (N,), True),
        (3, False, (N, H), True),
        (3, False, (N,), False),
    ],
)
def test_what_stays_is_as_if_there_had_been_no_drafts(drafts, one_by_one, decays, takes_back):
    """Of every row some drafts stay at each step, none of them, or all; now and then a row pauses. A model that drafts
    reads a token at a time."""
    rng, P = np.random.default_rng(drafts), 1 + drafts
    taps = {name: rng.normal(size=(*shape, W)).astype(np.float32) for name, shape in SHAPES.items()}
    taps |= {} if takes_back else {"skip": rng.normal(size=N).astype(np.float32)}
    text, rates = numbers(rng, STEPS * P, decays)  # more than will stay
    memory = empty_memory(text, W) | {"start": jnp.zeros(B, jnp.int32)}
    memory |= {n: jnp.pad(memory[n], ((0, 0), (0, P), (0, 0), (0, 0))) for n in ("conv_q", "conv_k", "conv_v")}
    memory |= {"log_decay": jnp.zeros((B, P, *decays)), "beta": jnp.zeros((B, P, N))}
    at, outs, rows = np.zeros(B, int), [[] for _ in range(B)], np.arange(B)[:, None]
    for _ in range(STEPS):
        count, runs = rng.integers(0, P, B), rng.uniform(size=B) < 0.8  # drafts that there are
        right = np.minimum(rng.integers(0, P, B), count)
        wrong, index, own = numbers(rng, P, decays), at[:, None] + np.arange(P), np.arange(P) <= right[:, None]
        own = {n: own.reshape(B, P, *(1,) * n) for n in (1, 2)}
        x, how = jax.tree.map(lambda a, b, i=index, o=own: np.where(o[a.ndim - 2], a[rows, i], b), (text, rates), wrong)
        valid = (np.arange(P) <= count[:, None]) & runs[:, None]
        out, after = read(x, taps, how, memory, at, valid, 1 if one_by_one else P)
        for row in np.flatnonzero(~runs):
            assert all(np.array_equal(after[n][row], memory[n][row]) for n in memory)
        memory = after
        for row in np.flatnonzero(runs):
            outs[row] += list(out[row, : 1 + right[row]])
            at[row] += 1 + right[row]
    valid = np.arange(STEPS * P) < at[:, None]
    wanted, whole = jax.jit(delta_net)(text, taps, *rates, empty_memory(text, W), jnp.zeros_like(valid), valid)
    assert min(at) > 3
    for row in range(B):
        np.testing.assert_allclose(outs[row], wanted[row, : at[row]], atol=2e-5)  # measured: up to 1.5e-6
    # A step more keeps what the last one read: the state of all that stayed.
    _, last = read(x, taps, how, memory, at, np.ones((B, P), bool), P)
    np.testing.assert_allclose(last["state"], whole["state"], atol=2e-5)


@pytest.mark.parametrize("decays", [(N,), (N, H)], ids=["alike", "by channel"])
def test_the_kernel_for_gpus_does_it_where_states_lie(decays):
    """Of three drafts, of which all, some and none stayed; other slots stay as they are."""
    rng, T, slots = np.random.default_rng(0), 4, 6
    x, rates = numbers(rng, 2 * T, decays)
    states, slot = rng.normal(size=(slots, N, H, V)).astype(np.float32), jnp.array([5, 0, 2])
    kept, first = jnp.array([4, 2, 0]), jnp.array([4, 3, 0])
    assert delta_drafts_kernel.fits(2 * T, states)
    given = x["q"][:, :T], x["k"] / 4, x["v"], *rates

    def kernel(few, states):
        return delta_drafts_kernel.pallas(few, states, slot, interpret=True)

    run = jax.jit(few_tokens, static_argnums=8)
    wanted, expected = run(*given, states[slot], kept, first, at_once)
    out, found = run(*given, states, kept, first, kernel)
    np.testing.assert_allclose(out, wanted, atol=1e-5)  # measured: 1.2e-6
    np.testing.assert_allclose(found[slot], expected, atol=1e-5)
    np.testing.assert_array_equal(found[2], states[2])  # nothing stayed
    np.testing.assert_array_equal(found[jnp.array([1, 3, 4])], states[[1, 3, 4]])
