"""Rows sampled together: each as an independent numpy oracle has it, and bit for bit as if it were alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from shardlm.ops.batch_sampling import Edits, RowSettings, sample_rows
from shardlm.ops.penalties import TokenCounts, count_tokens, counts_of, empty_counts, set_rows
from shardlm.ops.row_search import largest_threshold, ordered_sum, sortable

ROWS, VOCAB = 48, 203  # no multiple of 32
sampled = jax.jit(sample_rows, static_argnames="top_n")
WANTED = np.array([0, 2])  # what rows are told: nothing, or all


def case(seed: int, rows: int = ROWS):
    """Random (logits, settings, counts, edits, allowed) in which every option is on in some rows and off in others."""
    rng = np.random.default_rng(seed)

    def some(values, off, dtype=np.float32):
        return np.where(rng.random(rows) < 0.5, off, values).astype(dtype)

    settings = RowSettings(
        temperature=np.where(rng.random(rows) < 0.2, 0, rng.uniform(0.2, 2, rows)).astype(np.float32),
        top_k=some(rng.integers(1, 30, rows), 0, np.int32),
        top_p=some(rng.uniform(0.05, 1, rows), 1),
        min_p=some(rng.uniform(0, 0.5, rows), 0),
        repetition=some(rng.uniform(0.5, 2, rows), 1),
        frequency=some(rng.uniform(-1, 1, rows), 0),
        presence=some(rng.uniform(-1, 1, rows), 0),
        seed=rng.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        position=rng.integers(0, 1000, rows).astype(np.int32),
        banned_until=rng.integers(0, 1000, rows).astype(np.int32),
    )
    histories = [(rng.integers(0, VOCAB, rng.integers(0, 60)), rng.integers(0, VOCAB, 40)) for _ in range(rows)]
    prompt, reply = zip(*(counts_of(*history, VOCAB) for history in histories), strict=True)
    bias_ids = np.array([rng.permutation(VOCAB)[:5] for _ in range(rows)], np.int32)
    bias_ids[::3, 2:] = -1
    banned_ids = rng.integers(0, VOCAB, (rows, 4)).astype(np.int32)
    banned_ids[::4, 1:] = -1
    edits = Edits(bias_ids, rng.normal(0, 3, bias_ids.shape).astype(np.float32), banned_ids)
    allowed = rng.integers(-(2**31), 2**31, (rows, -(-VOCAB // 32))).astype(np.int32)
    allowed[::2] = -1
    logits = rng.normal(0, 2.5, (rows, VOCAB)).astype(np.float32)
    return logits, settings, TokenCounts(np.array(prompt), np.array(reply)), edits, allowed


def of_row(tree, b: int):
    return jax.tree.map(lambda a: a[b], tree)


def oracle_scores(logits, s: RowSettings, counts: TokenCounts, edits: Edits, allowed) -> np.ndarray:
    """One row's logits before noise, in float64: -inf where a token cannot be sampled."""
    x = logits.astype(np.float64)
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
    prompt = np.unpackbits(counts.prompt.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
    x[~bits] = -np.inf
    for token, bias in zip(edits.bias_ids, edits.bias, strict=True):
        x[token] += bias if token >= 0 else 0
    if s.position < s.banned_until:
        x[edits.banned_ids[edits.banned_ids >= 0]] = -np.inf
    for token in range(VOCAB):
        said = counts.reply[token]
        if prompt[token] or said:
            x[token] = x[token] / s.repetition if x[token] > 0 else x[token] * s.repetition
        x[token] -= s.frequency * said + s.presence * (said > 0)
    if s.temperature == 0:
        return x
    x = x / s.temperature
    x[np.exp(x - x.max()) < s.min_p] = -np.inf
    order = np.argsort(-x)
    if s.top_k:
        x[order[s.top_k :]] = -np.inf
    if s.top_p < 1:
        probability = np.exp(x[order] - x.max())
        mass = np.cumsum(probability / probability.sum())
        x[order[np.searchsorted(mass, s.top_p) + 1 :]] = -np.inf
    return x


def test_rows_of_all_settings_equal_the_oracle():
    kept_of_random = []
    for seed in range(6):
        logits, settings, counts, edits, allowed = made = case(seed)
        told = np.array([2, 1, 0] * ROWS)[:ROWS]
        got = sampled(logits, settings, counts=counts, edits=edits, allowed=allowed, top_n=7, told=told)
        raw = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        np.testing.assert_array_equal(got.top_ids, np.argsort(-logits, axis=-1)[:, :7])
        np.testing.assert_allclose(got.top_logprobs, -np.sort(-raw, axis=-1)[:, :7], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got.rank, 1 + (raw > raw[np.arange(ROWS), got.token][:, None]).sum(-1))
        np.testing.assert_allclose(got.logprob, raw[np.arange(ROWS), got.token], rtol=1e-5, atol=1e-5)
        for b in range(ROWS):
            s = of_row(settings, b)
            scores = oracle_scores(*of_row(made, b))
            if s.temperature > 0:
                kept_of_random.append(np.isfinite(scores).sum())
                key = jax.random.fold_in(jax.random.wrap_key_data(s.seed), s.position)
                scores = scores + np.asarray(jax.random.gumbel(key, (VOCAB,)))
            assert got.token[b] == scores.argmax(), (seed, b)
    # The cases are worth something: rows left with one token, with a few and with many.
    assert min(kept_of_random) == 1 and max(kept_of_random) == VOCAB and 2 < np.median(kept_of_random) < VOCAB / 2


def test_a_row_is_the_same_alone_in_any_batch_and_in_any_place():
    logits, settings, counts, edits, allowed = case(7)
    whole = sampled(logits, settings, counts=counts, edits=edits, allowed=allowed)
    order = np.random.default_rng(0).permutation(ROWS)
    for chosen in (order, order[:7], *order[:12, None]):
        part = jax.tree.map(lambda a, rows=chosen: a[rows], (logits, settings, counts, edits, allowed))
        got = sampled(part[0], part[1], counts=part[2], edits=part[3], allowed=part[4])
        np.testing.assert_array_equal(got.token, whole.token[chosen])
        np.testing.assert_array_equal(np.asarray(got.logprob).view(np.uint32), whole.logprob[chosen].view(jnp.uint32))
    plain = dataclasses.replace(RowSettings.defaults(ROWS), temperature=np.ones(ROWS, np.float32))
    busy = dataclasses.replace(settings, **{f: getattr(settings, f).copy() for f in settings.__dataclass_fields__})
    for field in settings.__dataclass_fields__:
        getattr(busy, field)[5] = getattr(plain, field)[5]
    # Row 5 asks for nothing; that its neighbours need searches and penalties leaves it alone.
    assert sampled(logits, plain).token[5] == sampled(logits, busy, counts=counts).token[5]


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_frequencies_pass_a_chi_square_test(vary):
    draws, probability = 20_000, np.array([0.35, 0.25, 0.2, 0.1, 0.06, 0.04])
    settings = RowSettings.defaults(draws)
    settings.temperature[:] = 0.5  # squares the probabilities
    settings.top_k[:] = 5
    settings.top_p[:] = 0.97  # of the squares' 0.44, 0.22, 0.14, 0.04, 0.01 the first four reach it
    if vary == "seed":
        settings.seed[:, 1] = np.arange(draws)
    else:
        settings.position[:] = np.arange(draws)
    logits = np.broadcast_to(np.log(probability).astype(np.float32), (draws, 6))
    counts = np.bincount(sampled(logits, settings).token, minlength=6)
    expected = np.square(probability[:4]) / np.square(probability[:4]).sum() * draws
    assert counts[4:].sum() == 0
    # 16.27: exceeded by one in a thousand fair samples, three degrees of freedom.
    assert (np.square(counts[:4] - expected) / expected).sum() < 16.27


def test_seeds_below_32_bits_are_those_of_jax():
    settings = RowSettings.defaults(1)
    settings.temperature[:], settings.seed[0, 1], settings.position[:] = 1, 123_456_789, 17
    logits = jnp.zeros((1, VOCAB))
    key = jax.random.fold_in(jax.random.key(123_456_789), 17)
    assert sampled(logits, settings).token[0] == jax.random.categorical(key, logits[0])


def test_ties_at_the_edges_are_kept_and_numbers_that_are_none_are_told():
    settings = RowSettings.defaults(600)
    settings.temperature[:], settings.top_k[:200], settings.top_p[200:400], settings.top_p[400:] = 1, 1, 0.01, 0
    settings.position[:] = np.arange(600)
    logits = np.broadcast_to(np.array([-0.0, 0.0, -0.0, -1], np.float32), (600, 4))
    token = np.asarray(sampled(logits, settings).token).reshape(3, 200)
    assert all(set(half) == {0, 1, 2} for half in token.tolist())
    broken = np.where(np.arange(600)[:, None] == 3, np.nan, logits)
    got = sampled(broken, settings)
    assert np.isnan(got.logprob).tolist() == (np.arange(600) == 3).tolist()
    assert 0 <= got.token[3] < 4


def test_penalties_by_transformers_formulas_and_counts_kept_on_the_device():
    vocab, count = 40, jax.jit(count_tokens)
    counts = set_rows(empty_counts(3, vocab), jnp.array([1, 9]), *map(jnp.asarray, two(counts_of([3, 39], [5], vocab))))
    for tokens, active in (([7, 5, 0], [1, 1, 0]), ([7, 5, 0], [1, 1, 0]), ([8, 6, 1], [1, 0, 0])):
        counts = count(counts, jnp.array(tokens), jnp.array(active, bool))
    assert {int(t): int(n) for t, n in enumerate(counts.reply[0]) if n} == {7: 2, 8: 1}
    assert {int(t): int(n) for t, n in enumerate(counts.reply[1]) if n} == {5: 3} and not counts.reply[2].any()
    settings = RowSettings.defaults(3)
    settings.repetition[1], settings.frequency[0], settings.presence[0] = 2.0, 0.5, 0.25
    logits = np.full((3, vocab), -9, np.float32)
    logits[0, [7, 8, 1]] = 3.0, 2.4, 1.8  # 3 - 0.5 * 2 - 0.25 = 1.75, 2.4 - 0.5 - 0.25 = 1.65
    logits[1, [3, 5, 39, 1]] = -0.8, 1.0, 0.7, 0.49  # -1.6, 0.5, 0.35: score < 0 ? score * 2 : score / 2
    assert sampled(logits, settings, counts=counts).token.tolist() == [1, 5, 0]
    settings.repetition[1] = 2.1  # 1 / 2.1 = 0.476
    assert sampled(logits, settings, counts=counts).token.tolist() == [1, 1, 0]
    full = dataclasses.replace(counts, reply=jnp.full_like(counts.reply, 32_766))
    for _ in range(2):
        full = count(full, jnp.array([1, 1, 1]), jnp.array([True, True, False]))
    assert full.reply[:, 1].tolist() == [32_767, 32_767, 32_766]


def two(row):
    """A row and a second one whose number is beyond the batch."""
    return tuple(np.stack([a, a]) for a in row)


def primitives(jaxpr, into_branches: bool):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        inner = [] if equation.primitive.name == "cond" and not into_branches else equation.params.values()
        for value in inner:
            for part in value if isinstance(value, tuple | list) else [value]:
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from primitives(getattr(part, "jaxpr", part), into_branches)


def test_greedy_rows_pay_for_no_noise_and_no_search():
    logits, settings, counts, edits, allowed = case(0, rows=2)

    def all_options(*args):
        return sample_rows(*args[:2], counts=args[2], edits=args[3], allowed=args[4])

    jaxpr = jax.make_jaxpr(all_options)(logits, settings, counts, edits, allowed).jaxpr
    expensive = {"sort", "while", "scan", "random_bits", "threefry2x32", "cumsum"}
    assert not expensive & set(primitives(jaxpr, into_branches=False))
    assert expensive & set(primitives(jaxpr, into_branches=True)) >= {"scan", "random_bits"}
    assert "sort" not in set(primitives(jaxpr, into_branches=True))
    draw = [e for e in jaxpr.eqns if e.primitive.name == "cond"][-1]
    greedy, random = (set(primitives(branch.jaxpr, into_branches=True)) for branch in draw.params["branches"])
    assert not expensive & greedy and "random_bits" in random
    compiled = jax.jit(all_options).lower(logits, settings, counts, edits, allowed).compile()
    # Changes: masks, biases, banned tokens, penalties; drawing: top_k, top_p. None became a select.
    assert compiled.as_text().count(" conditional(") == 8
    assert sum(e.primitive.name == "cond" for e in jaxpr.eqns) == 2


def test_what_no_row_wants_told_is_not_made():
    logits, settings, *_ = case(1, rows=3)
    for most in (0, 1, 2):
        got = sampled(logits, settings, top_n=4, told=np.array([0, most, 0]))
        assert bool(np.any(got.rank)) == (most > 0) and bool(np.any(got.top_ids)) == (most > 1)
    assert not np.any(sampled(logits, settings, top_n=4).rank)


def test_a_mesh_gives_the_same_tokens():
    logits, settings, counts, edits, allowed = made = case(3)
    alone = sampled(logits, settings, counts=counts, edits=edits, allowed=allowed, top_n=3, told=WANTED)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        logits, settings, counts, edits, allowed = jax.device_put(made, jax.NamedSharding(mesh, PartitionSpec()))
        got = sampled(logits, settings, counts=counts, edits=edits, allowed=allowed, top_n=3, told=WANTED)
        counts = jax.jit(count_tokens, donate_argnums=0)(counts, got.token, settings.temperature > 0)
        assert counts.reply.sharding.is_fully_replicated and got.token.sharding.is_fully_replicated
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_search_and_sum():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 3001)) * np.exp(rng.normal(0, 8, (5, 3001)))).astype(np.float32)
    x[:, :3] = 0.0, np.inf, -np.inf
    k = jnp.array([1, 2, 77, 3001, 3002])
    found = jax.jit(lambda x: largest_threshold(sortable(x), lambda m: m.sum(-1, dtype=jnp.int32), k))(x)
    keys = np.sort(jax.jit(sortable)(x), axis=-1)[:, ::-1]
    np.testing.assert_array_equal(keys, jax.jit(sortable)(-np.sort(-x, axis=-1)))
    assert found.tolist() == [*(keys[row, n - 1] for row, n in enumerate(k[:4])), 0]
    finite = x[:, 3:]
    exact = finite.astype(np.float64).sum(-1)
    # 18 levels of rounding at most, each half a unit of the magnitudes summed.
    np.testing.assert_allclose(jax.jit(ordered_sum)(finite), exact, atol=18 * 6e-8 * np.abs(finite).sum(-1).max())
