"""Gradients of documents made of a few rows and heads at a time, by what stands in for cuDNN's kernels
(cudnn_stand_in.py): the same as of all at once, and by calls that are as small as was asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cudnn_stand_in import stand_in
from jax._src.cudnn import fused_attention_stablehlo as fused

from shardlm.ops import cudnn_documents, cudnn_groups
from shardlm.ops.attention import reference
from shardlm.ops.cudnn_attention import cudnn
from shardlm.ops.cudnn_documents import Documents, counts
from shardlm.ops.cudnn_groups import Group, Rows, by_groups

GiB = 2**30
T, H, SCALE = 24, 8, 0.3
LEVELS = (4, 8)


@pytest.mark.parametrize(
    ("rows", "groups"),
    [
        ((2, 4096, 32, 8, 64), [Group(2, 8, 4), Group(1, 4, 4)]),
        ((16, 4096, 32, 8, 64), [Group(2, 8, 4), Group(1, 4, 4)]),
        ((4, 8192, 32, 8, 128), [Group(1, 2, 4), Group(1, 1, 2)]),
        ((8, 4096, 32, 32, 64), [Group(4, 32, 1), Group(1, 32, 1)]),
        ((1, 16384, 32, 8, 64), [Group(1, 1, 4), Group(1, 1, 1)]),
        ((3, 4096, 18, 3, 64), [Group(3, 3, 6), Group(1, 1, 6)]),
        ((1, 131072, 4, 1, 64), [Group(1, 1, 1)]),
    ],
)
def test_what_one_call_takes(rows, groups):
    """1 GiB and a little, or as much as rows of one document."""
    rows = Rows(*rows, rows[-1])
    levels = rows.bounded(counts(rows.tokens, rows.key_dim, rows.value_dim, 0))
    assert [rows.group(most) for most in levels] == groups
    for most, group in zip(levels, groups, strict=True):
        assert rows.workspace(most, group) <= max(1.05 * GiB, rows.workspace())


def test_what_the_kernel_keeps():
    """As compiled on an H200 (jaxlib 0.11.2), MiB."""
    MiB = 2**20
    rows = Rows(8, 4096, 32, 8, 64, 64)
    assert rows.workspace() == 516 * MiB and rows.workspace(8) == 8 * 516 * MiB
    assert rows.workspace(8, Group(2, 8, 4)) == 1032 * MiB and rows.workspace(32, Group(1, 2, 4)) == 516 * MiB
    assert Rows(4, 8192, 32, 8, 128, 128).workspace() == 1028 * MiB
    assert Rows(8, 4096, 32, 32, 64, 64).workspace() == 260 * MiB
    assert Rows(1, 16384, 32, 8, 64, 64).workspace(128, Group(1, 1, 1)) == 520 * MiB
    assert Rows(4, 4096, 32, 32, 192, 128).workspace() == 4 * 4096 * 32 * 193 * 4
    assert Rows(1, 131072, 4, 1, 64, 64).bounded((256, 1024)) == (33,)


def documents(rng, rows: int, most: int) -> np.ndarray:
    """Rows of 1 to `most` documents, of which one has so many."""
    counts = [most, *rng.integers(1, most + 1, rows - 1)]
    ends = [np.sort(rng.choice(np.arange(1, T), count - 1, replace=False)) for count in counts]
    return np.stack([np.searchsorted(end, np.arange(T), side="right") for end in ends]).astype(np.int32)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "call_bytes", "groups"),
    [
        (8, 4, 2, 0, [Group(2, 2, 2), Group(1, 2, 2)]),
        (3, 6, 3, 0, [Group(1, 1, 2), Group(1, 1, 2)]),
        (2, 4, 2, 0, [Group(1, 1, 2), Group(1, 1, 1)]),
        (1, 4, 4, 7000, [Group(1, 2, 1), Group(1, 1, 1)]),
        (1, 4, 1, 7000, [Group(1, 1, 1), Group(1, 1, 1)]),
    ],
)
@pytest.mark.parametrize("level", [0, 1])
def test_gradients_of_groups(rows, heads, kv_heads, call_bytes, groups, level, monkeypatch):
    """Equal to those of all rows and heads at once, rows that have fewer documents included."""
    calls = stand_in(monkeypatch)
    monkeypatch.setattr(cudnn_documents, "LEAST_TOKENS", T)
    monkeypatch.setattr(cudnn_documents, "TOKENS_EACH", [T // most for most in LEVELS])
    rng = np.random.default_rng(level)
    shapes = [(rows, T, n, H) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d_out = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    ids = jnp.asarray(documents(rng, rows, LEVELS[level]))

    def gradients(attend):
        return jax.jit(lambda q, k, v, d_out: jax.vjp(lambda *a: attend(*a, ids, SCALE), q, k, v)[1](d_out))

    at_once = gradients(cudnn)(q, k, v, d_out)
    monkeypatch.setattr(cudnn_groups, "CALL_BYTES", call_bytes)
    calls.clear()
    found = gradients(cudnn)(q, k, v, d_out)
    expected = gradients(reference)(q, k, v, d_out)
    for name, a, b, c in zip(("q", "k", "v"), found, at_once, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(a, c, atol=1e-5, err_msg=name)
    called = [call for call in calls if call.mask == fused.MaskType.PADDING_CAUSAL][2:]  # the first are forward
    sizes = [Group(call.shape[0], call.kv_heads, call.shape[2] // call.kv_heads) for call in called]
    assert sizes == groups and [call.most for call in called] == list(LEVELS)


def test_a_kv_heads_gradients_are_summed_in_float32(monkeypatch):
    """Where its query heads are in several calls: of 16 bits 256 and seven ones would be 256."""
    monkeypatch.setattr(cudnn_groups, "CALL_BYTES", 0)
    of_heads = jnp.asarray([256.0] + [1.0] * 7, jnp.bfloat16)
    q = jnp.broadcast_to(of_heads[:, None], (1, T, 8, H))
    k = jnp.zeros((1, T, 1, H), jnp.bfloat16)
    ids = jnp.asarray(documents(np.random.default_rng(2), 1, 8))
    run = lambda q, k, *rest, where: (q, q.sum(2, keepdims=True), 2 * q.sum(2, keepdims=True))  # noqa: E731
    assert Rows.of(q, k, k).group(8) == Group(1, 1, 1)
    d_q, d_k, d_v = by_groups(run, 8, ids, Documents.of(ids, 8), q, k, k, q, q[..., 0].transpose(0, 2, 1), q)
    assert np.array_equal(d_q, q) and (d_k == jnp.bfloat16(263.0)).all() and (d_v == jnp.bfloat16(526.0)).all()
