"""Documents of packed rows as sequences of cuDNN's kernel, which a CPU has not (cudnn_stand_in.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_stand_in import stand_in
from jax._src.cudnn import fused_attention_stablehlo as fused

from shardlm.ops import cudnn_documents
from shardlm.ops.attention import reference
from shardlm.ops.cudnn_attention import cudnn
from shardlm.ops.cudnn_documents import Documents, by_document, levels, most_documents, of_rows

B, T, N, K, H, SCALE = 2, 24, 4, 2, 8, 0.3
ROWS = {
    "one each": [[1] * 24, [5] * 24],
    "few": [[1] * 7 + [2] * 17, [3] * 24],
    "padding": [[1] * 3 + [2] * 2 + [3] * 10 + [0] * 9, [4] * 20 + [0] * 4],
    "as many as fit": [[*range(1, 7), *[7] * 18], [1] * 12 + [2] * 12],
    "too many": [list(range(24)), [1] * 24],
}


def test_where_documents_lie():
    ids = jnp.asarray(ROWS["padding"], jnp.int32)
    where = Documents.of(ids, 5)
    assert where.lengths.tolist() == [[3, 2, 10, 9, -1], [20, 4, -1, -1, -1]]
    assert where.starts.tolist() == [[0, 3, 5, 15, -1], [0, 20, -1, -1, -1]]
    assert where.first.tolist() == [0, 3, 5, 15, 24, 44, 48, 48, 48, 48]
    fewer = where.few(4)
    assert jax.tree.all(jax.tree.map(np.array_equal, fewer, Documents.of(ids, 4)))
    assert where.number[0].tolist() == [0] * 3 + [1] * 2 + [2] * 10 + [3] * 9
    assert where.number[1].tolist() == [4] * 20 + [5] * 4
    assert where.place[0].tolist() == [0, 1, 2, 0, 1, *range(10), *range(9)]
    assert [int(most_documents(jnp.asarray(ids, jnp.int32))) for ids in ROWS.values()] == [1, 2, 4, 7, 24]


def test_what_documents_have_and_what_tokens_have():
    where = Documents.of(jnp.asarray(ROWS["padding"], jnp.int32), 5)
    of_tokens = jnp.asarray(np.random.default_rng(0).normal(size=(B, N, T)), jnp.float32)
    apart = by_document(of_tokens, where)
    assert apart.shape == (10, N, T) and np.array_equal(of_rows(apart, where), of_tokens)
    assert np.array_equal(apart[2, :, :10], of_tokens[0, :, 5:15])
    assert np.array_equal(apart[5, :, :4], of_tokens[1, :, 20:])


@pytest.mark.parametrize("name", ROWS)
def test_documents_are_kept_apart(name, monkeypatch):
    """By the way that their number asks for, of which one runs; gradients by the same."""
    calls = stand_in(monkeypatch)
    monkeypatch.setattr(cudnn_documents, "LEAST_TOKENS", T)
    monkeypatch.setattr(cudnn_documents, "TOKENS_EACH", (6, 3))
    assert levels(T, H, H, 0) == (4, 8) and levels(T, H, H, 5) == levels(T, H, 4, 0) == levels(T - 1, H, H, 0) == ()
    rng = np.random.default_rng(1)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K, N))
    ids = jnp.asarray(ROWS[name], jnp.int32)
    found, pull = jax.vjp(lambda *a: cudnn(*a, ids, SCALE), q, k, v)
    expected, wanted = jax.vjp(lambda *a: reference(*a, ids, SCALE), q, k, v)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(cudnn(q, k, v, ids, SCALE), expected, atol=1e-5)
    for a, b in zip(pull(d_out), wanted(d_out), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    kinds = fused.MaskType
    ways = {(kinds.CAUSAL, False), (kinds.PADDING_CAUSAL, False), (kinds.CAUSAL, True)}
    assert {call[:2] for call in calls} == ways
    assert len(calls) == 3 * 4  # four branches, forward, backward and without gradients
