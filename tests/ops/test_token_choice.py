"""Which tokens queries attend to: the choice against a sort, over pages against whole rows, and attention to what is
chosen against a mask. The kernels for GPUs are interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import choice_kernel, paged_choice
from shardlm.ops.attention import attend
from shardlm.ops.kv_format import SCALE, order_of, packed, unpacked
from shardlm.ops.paged_attention import blocked
from shardlm.ops.row_search import kth_largest, sortable
from shardlm.ops.token_choice import Index, chosen_in_rows, highest

PAGE, WIDTH = 4, 40  # 160 positions: three blocks of keys of the kernel's


def best(scores, allowed, count):
    """By a stable sort of each row."""
    found = np.zeros(allowed.shape, bool)
    for row in np.ndindex(*allowed.shape[:-1]):
        order = np.argsort(-np.where(allowed[row], scores[row], -np.inf), kind="stable")[:count]
        found[row][order] = True
    return found & allowed


@pytest.mark.parametrize("anywhere", [True, False])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_highest_are_those_of_a_stable_sort(count, anywhere, monkeypatch):
    monkeypatch.setattr(choice_kernel, "BLOCK_SCORES", 16)
    rng = np.random.default_rng(count)
    scores = rng.integers(-3, 4, (2, 5, 40)).astype(np.float32)  # of which most are equal
    scores[0] += rng.normal(size=(5, 40)).astype(np.float32) * 1e-3
    scores[1, 0, :2] = 0.0, -0.0
    ends = np.array([[0, 6, 7, 20, 39], [39, 38, 8, 16, 15]], np.int32)
    allowed = rng.random((2, 5, 40)) < 0.6 if anywhere else np.arange(40) <= ends[..., None]
    chosen = np.asarray(jax.jit(partial(highest, count=count))(scores, allowed))
    np.testing.assert_array_equal(chosen, best(scores, allowed, count))
    if anywhere:
        return
    # The kernel's, up to a position, which lists the places in pages.
    table = np.random.default_rng(1).permutation(20).reshape(2, 10).astype(np.int32)
    listed = choice_kernel.chosen(
        jnp.asarray(scores), jnp.asarray(ends), jnp.asarray(table), count, PAGE, interpret=True
    )
    for row in np.ndindex(2, 5):
        places = np.flatnonzero(chosen[row])
        assert int(listed["number"][row]) == len(places)
        slots = table[row[0], places // PAGE] * PAGE + places % PAGE
        np.testing.assert_array_equal(listed["slots"][row][: len(places)], slots)


def test_the_kth_largest_of_all_numbers():
    keys = np.array([[0, 5, 2**32 - 1, 2**31, 5, 1]], np.uint32)
    found = [int(kth_largest(jnp.asarray(keys), k)[0]) for k in range(1, 8)]
    assert found == [*sorted(map(int, keys[0]), reverse=True), 0]
    numbers = np.array([-np.inf, -1.5, -0.0, 0.0, 2.0, np.inf], np.float32)
    assert np.all(np.diff(np.asarray(sortable(numbers)).astype(np.int64)) >= 0)


def index_of(rng, rows, T, heads=6, width=12, count=9, dtype=np.float32):
    q, weights, k = (rng.normal(size=(rows, T, *of)) for of in ((heads, width), (heads,), (width,)))
    return Index(jnp.asarray(q, dtype), jnp.asarray(weights, jnp.float32), jnp.asarray(k, dtype), count)


# how the pages hold keys, tokens of a step, positions that rows end at
CASES = {
    "decode": ("auto", 1, (160, 3, 77)),
    "chunk": ("auto", 13, (160, 30, 77)),
    "fp8": ("fp8", 2, (160, 9, 101)),
    "int8": ("int8", 11, (101, 11, 64)),
}


@pytest.mark.parametrize("name", ["blocked", "pallas"])
@pytest.mark.parametrize("case", CASES)
def test_pages_choose_and_attend_as_rows_do(case, name, monkeypatch):
    how, T, ends = CASES[case]
    monkeypatch.setattr(paged_choice, "AT_ONCE", 3 * 160 * 5)  # of chunks, five queries at a time or fewer
    rng = np.random.default_rng(len(case))
    B, S, N, R, V, scale = len(ends), PAGE * WIDTH, 4, 24, 18, 0.3
    q, latents = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, N, R), (B, S, 1, R)))
    whole, step = index_of(rng, B, S), index_of(rng, B, T)
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32)
    rounded = jax.jit(lambda a: a if how == "auto" else unpacked(*packed(a, how), jnp.float32))
    positions = np.stack([np.arange(end - T, end) for end in ends]).astype(np.int32)
    rows = np.arange(B)[:, None]
    keys = np.array(rounded(whole.k))
    keys[rows, positions] = rounded(step.k)
    table = rng.permutation(np.arange(1, B * WIDTH + 1)).reshape(B, WIDTH).astype(np.int32)

    def pool(numbers):
        """[B, S, 1, x] as pages, twice as many with noise before them: those of another layer."""
        own = np.zeros((B * WIDTH + 1, PAGE, *numbers.shape[2:]), np.float32)
        own[table] = np.asarray(numbers).reshape(B, WIDTH, PAGE, *numbers.shape[2:])
        return np.concatenate([rng.normal(size=own.shape).astype(np.float32), own])

    @partial(jax.jit, static_argnums=0)
    def held(entry, numbers):
        parts = (numbers, None) if how == "auto" else packed(numbers, how)
        found = {entry + end: a for end, a in zip(("", SCALE), parts, strict=True) if a is not None}
        return {key: jnp.einsum(f"pskh->{order_of(key, a.dtype, name)}", a) for key, a in found.items()}

    where = jnp.asarray(table), jnp.asarray(positions), jnp.ones((B, T), bool), jnp.int32(B * WIDTH + 1)
    choose = jax.jit(lambda pools: paged_choice.choose(step, pools, "i", *where, name, interpret=True))
    selection, _ = choose(held("i", pool(np.asarray(whole.k)[:, :, None])))
    scores = np.einsum("btns,btn->bts", np.maximum(np.einsum("btnh,bsh->btns", step.q, keys), 0), step.weights)
    chosen = best(scores, np.arange(S) <= positions[:, :, None], step.count)
    kv = np.asarray(rounded(latents))
    expected = jax.jit(partial(attend, scale=scale, sinks=sinks))(q, kv, kv[..., :V], chosen)
    pools = held("k", pool(latents))
    options = {"scale": scale, "value_dim": V, "sinks": sinks, "first_page": where[3]}
    if name == "blocked":
        np.testing.assert_array_equal(selection, chosen)
        run = partial(blocked, v_pool=None, page_table=where[0], positions=where[1], chosen=selection, **options)
        found = jax.jit(run)(q, pools["k"], k_scale=pools.get("k_scale"))
    else:
        run = partial(paged_choice.attend, selection=selection, interpret=True, **options)
        found = jax.jit(run)(q, pools["k"], pools.get("k_scale"))
    np.testing.assert_allclose(found, expected, atol=2e-6)  # sums in another order


def test_rows_choose_within_their_segments():
    rng = np.random.default_rng(0)
    index = index_of(rng, 2, 24, count=5)
    segments = jnp.asarray(np.sort(rng.integers(0, 3, (2, 24)), axis=1), jnp.int32)
    found = np.asarray(jax.jit(chosen_in_rows)(index, segments))
    each = np.einsum("btnh,bsh->btns", index.q, index.k)
    scores = np.einsum("btns,btn->bts", np.maximum(each, 0), index.weights)
    allowed = (segments[:, :, None] == segments[:, None]) & np.tril(np.ones((24, 24), bool))
    np.testing.assert_array_equal(found, best(scores, np.asarray(allowed), 5))
