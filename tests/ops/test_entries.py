"""Attention to the last tokens and to entries of several: rows of packed documents against a loop over queries, and
pages, in chunks, against rows. The kernel for GPUs is interpreted."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import compressed_pages, compressed_rows
from shardlm.ops.compressed_pages import Pools, Spot, attend_pages, rows_of_widths
from shardlm.ops.compressed_rows import attend_rows
from shardlm.ops.compression import Chooser, Compressed, Series, entries
from shardlm.ops.rope import Rope

B, T, N, H, WINDOW, ROPE = 2, 21, 4, 16, 5, Rope(dim=4)
HOW = {"scale": H**-0.5, "window": WINDOW}


def series(rng, rate, windows, width) -> Series:
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return Series(draw(B, T, 2, windows, width), draw(rate, windows, width), 1 + draw(width) / 4, 1e-6, ROPE)


def made(kind: str) -> Compressed | None:
    rng = np.random.default_rng(3)
    if kind == "none":
        return None
    if kind == "all":
        return Compressed(series(rng, 4, 1, H), None)
    q, weights = (jnp.asarray(rng.normal(size=(B, T, 3, *rest)), jnp.float32) for rest in ((8,), ()))
    return Compressed(series(rng, 2, 2, H), Chooser(series(rng, 2, 2, 8), q, weights, 3))


def inputs():
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return draw(B, T, N, H), draw(B, T, H), draw(N)


of_tokens = jax.jit(entries)


def one_query(b, t, first, q, kv, compressed, sinks):
    """In numpy, of a document that begins at `first`."""
    q, kv, compressed, sinks = jax.tree.map(np.asarray, (q, kv, compressed, sinks))
    keys = [kv[b, s] for s in range(max(first, t - WINDOW + 1), t + 1)]
    if compressed:
        own = compressed.series
        count = (t - first + 1) // own.rate

        def entry(of, e):
            tokens = first + (e - of.windows + 1) * of.rate + np.arange(of.windows * of.rate)
            raw = of.raw[b, np.maximum(tokens, 0)][None, None]
            return np.asarray(of_tokens(of, raw, np.full((1, 1), e * of.rate, np.int32)))[0, 0]

        chosen = range(count)
        if chooser := compressed.chooser:
            of_index = np.array([entry(chooser.series, e) for e in range(count)]).reshape(count, 8)
            scores = np.maximum(chooser.q[b, t] @ of_index.T, 0).T @ chooser.weights[b, t]
            chosen = np.argsort(-scores, kind="stable")[: chooser.count]
        keys += [entry(own, e) for e in chosen]
    keys = np.array(keys)
    scores = np.concatenate([q[b, t] @ keys.T * HOW["scale"], sinks[:, None]], axis=1)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return (weights / weights.sum(1, keepdims=True))[:, :-1] @ keys


@pytest.mark.parametrize("kind", ["none", "all", "chosen"])
def test_rows_are_what_each_query_sees(kind, monkeypatch):
    """Two documents of a row, and one that padding follows, in blocks of 7 queries."""
    monkeypatch.setattr(compressed_rows, "queries_at_once", lambda *sizes: 7)
    (q, kv, sinks), compressed = inputs(), made(kind)
    segments = np.array([[1] * 9 + [2] * 12, [1] * 18 + [0] * 3], np.int32)
    positions = np.array([[*range(9), *range(12)], [*range(18), 0, 0, 0]], np.int32)
    out = jax.jit(partial(attend_rows, **HOW))(q, kv, compressed, positions, segments, sinks)
    for b, first, stop in ((0, 0, 9), (0, 9, 21), (1, 0, 18)):
        for t in range(first, stop):
            expected = one_query(b, t, first, q, kv, compressed, sinks)
            np.testing.assert_allclose(out[b, t], expected, atol=2e-5, err_msg=f"{b} {t}")


def test_blocks_are_as_small_as_pays():
    """One of 4,096 would multiply 4,255 keys a query, of which 128 tokens and 32 entries are seen; of scores no more
    are there at once than fit; and what divides into nothing is a block."""
    at_once = compressed_rows.queries_at_once
    assert at_once(4096, 16, 128, 32) == 128 and at_once(4096, 16, 128, 1024) == 512
    assert at_once(4096, 4096, 128, 1024) == 8 and compressed_rows.SCORES_BYTES >= 4 * 4096 * 8 * (127 + 8 + 1024)
    assert (at_once(4099, 1, 128, 32), at_once(64, 1, 128, 0)) == (4099, 64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reads", ["blocked", "pallas"])
@pytest.mark.parametrize("kind", ["none", pytest.param("all", marks=pytest.mark.wide), "chosen"])
def test_pages_hold_what_rows_have(kind, reads, monkeypatch):
    """Chunks of 8, 1, 5 and 1 tokens, and of 6 with two of padding. Entries of 4 tokens share pages with those of a
    layer that has none here."""
    monkeypatch.setattr(compressed_pages, "GATHERED_BYTES", 2**12)
    (q, kv, sinks), compressed = inputs(), made(kind)
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    whole = jax.jit(partial(attend_rows, **HOW))(q, kv, compressed, positions, np.ones((B, T), np.int32), sinks)
    size, width, pages = 4, 8, 200
    shape = (pages, 1, size, H) if reads == "blocked" else (pages, size, 1, H)
    held = {"c": jnp.zeros(shape), "i": jnp.zeros((*shape[:-1], 8))}
    both = [compressed.series, compressed.chooser and compressed.chooser.series] if compressed else []
    rows = rows_of_widths([2 * s.windows * s.width for s in both if s], H)
    order = np.random.default_rng(5).permutation(np.arange(1, 1 + B * width * (rows + 2))).reshape(-1, B, width)
    spots = [Spot(jnp.asarray(table, jnp.int32), jnp.int32(0), jnp.int32(0)) for table in order[: rows + 1]]
    if compressed:
        shared = kind == "all"
        spots.append(Spot(jnp.asarray(order[-1][:, :4], jnp.int32), jnp.int32(0), jnp.int32(shared), 1 + shared))

    @jax.jit
    def step(held, q, kv, compressed, positions, valid):
        pools = Pools(held, "c", "i", reads)
        return attend_pages(q, kv, compressed, pools, spots, positions, valid, sinks, **HOW, interpret=True)

    start = 0
    for count, padding in ((8, 0), (1, 0), (5, 0), (1, 0), (6, 2)):
        index = np.minimum(start + np.arange(count), T - 1)
        cut = lambda tree, index=index: jax.tree.map(lambda a: np.asarray(a)[:, index], tree)  # noqa: E731
        part = compressed and Compressed(
            dataclasses.replace(compressed.series, raw=cut(compressed.series.raw)),
            compressed.chooser
            and dataclasses.replace(
                compressed.chooser,
                q=cut(compressed.chooser.q),
                weights=cut(compressed.chooser.weights),
                series=dataclasses.replace(compressed.chooser.series, raw=cut(compressed.chooser.series.raw)),
            ),
        )
        valid = np.broadcast_to(np.arange(count) < count - padding, (B, count))
        out, held = step(held, cut(q), cut(kv), part, positions[:, index], valid)
        real = count - padding
        np.testing.assert_allclose(out[:, :real], whole[:, start : start + real], atol=2e-5, err_msg=f"{start}")
        start += real
