"""Linear attention of tokens that may turn out wrong, against rows of the tokens that stayed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops.delta_drafts import delta_net_of_drafts
from shardlm.ops.gated_delta import delta_net, empty_memory

B, K, N, H, V, W = 3, 2, 4, 16, 8, 4
STEPS = 12


def numbers(rng, tokens: int):
    shapes = {"q": (K, H), "k": (K, H), "v": (N, V)}
    x = {name: rng.normal(size=(B, tokens, *shape)).astype(np.float32) for name, shape in shapes.items()}
    decay, beta = (rng.normal(size=(B, tokens, N)).astype(np.float32) for _ in range(2))
    return x, -(decay**2) * np.exp(rng.normal(size=decay.shape)).astype(np.float32), 1 / (1 + np.exp(-beta))


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_what_stays_is_as_if_there_had_been_no_drafts(drafts):
    """Of every row some drafts stay at each step, none of them, or all; now and then a row pauses."""
    rng, P = np.random.default_rng(drafts), 1 + drafts
    taps = {
        n: rng.normal(size=(*shape, W)).astype(np.float32) for n, shape in (("q", (K, H)), ("k", (K, H)), ("v", (N, V)))
    }
    text, decay, beta = numbers(rng, STEPS * P)  # more than will stay
    memory = empty_memory(text, W) | {"start": jnp.zeros(B, jnp.int32)}
    memory |= {n: jnp.pad(memory[n], ((0, 0), (0, P), (0, 0), (0, 0))) for n in ("conv_q", "conv_k", "conv_v")}
    memory |= {name: jnp.zeros((B, P, N)) for name in ("log_decay", "beta")}
    run, at, outs = jax.jit(delta_net_of_drafts), np.zeros(B, int), [[] for _ in range(B)]
    rows = np.arange(B)[:, None]
    for _ in range(STEPS):
        right, count = rng.integers(0, P, B), rng.integers(0, P, B)  # drafts that stay, that there are
        right, runs = np.minimum(right, count), rng.uniform(size=B) < 0.8
        wrong, wrong_decay, wrong_beta = numbers(rng, P)
        index, own = at[:, None] + np.arange(P), (np.arange(P) <= right[:, None])
        x = {n: np.where(own[..., None, None], text[n][rows, index], wrong[n]) for n in text}
        rates = (np.where(own[..., None], a[rows, index], b) for a, b in ((decay, wrong_decay), (beta, wrong_beta)))
        valid = (np.arange(P) <= count[:, None]) & runs[:, None]
        out, after = run(x, taps, *rates, memory, at.astype(np.int32), valid)
        for row in np.flatnonzero(~runs):
            assert all(np.array_equal(after[n][row], memory[n][row]) for n in memory)
        memory = after
        for row in np.flatnonzero(runs):
            outs[row] += list(np.asarray(out[row, : 1 + right[row]]))
            at[row] += 1 + right[row]
    valid = np.arange(STEPS * P) < at[:, None]
    how = empty_memory(text, W), jnp.zeros_like(valid), valid
    wanted, _ = jax.jit(delta_net)(text, taps, decay, beta, *how)
    assert min(at) > 3
    for row in range(B):
        np.testing.assert_allclose(outs[row], wanted[row, : at[row]], atol=2e-5)  # measured: up to 1e-6
    # A step that keeps what the last one read: the state of all that stayed.
    *_, last = run(x, taps, *(np.zeros((B, P, N), np.float32),) * 2, memory, at.astype(np.int32), np.ones((B, P), bool))
    _, whole = jax.jit(delta_net)(text, taps, decay, beta, *how)
    np.testing.assert_allclose(last["state"], whole["state"], atol=2e-5)
