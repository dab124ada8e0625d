"""Attention over the context axis against the reference on whole rows, values and gradients; the zigzag order; which
meetings of blocks a window or documents leave out; and what is handed to cuDNN, by its documented contract."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.ad_checkpoint import saved_residuals
from jax._src.cudnn import fused_attention_stablehlo
from small import mesh_of, relative_error

from shardlm.mesh import MeshSpec
from shardlm.ops import attention_pair
from shardlm.ops.attention import packed_attention, reference
from shardlm.ops.cudnn_attention import cudnn
from shardlm.ops.ring_attention import _Ring, stops, zigzag
from shardlm.rules import Rules

B, T, N, K, H, VALUE = 2, 64, 8, 2, 8, 6
SCALE = 0.3


def order(C: int) -> np.ndarray:
    """Where the tokens of a row are, in zigzag order."""
    chunks = np.arange(T).reshape(2 * C, -1)
    return np.concatenate([chunks[[i, 2 * C - 1 - i]].ravel() for i in range(C)])


def rows_of_documents() -> dict[str, np.ndarray]:
    """segment_ids [B, T]: one document; several and padding, cut at different places; cut where chunks are."""
    several = [np.repeat([1, 2, 3, 0], lengths) for lengths in ([5, 41, 11, 7], [37, 1, 26, 0])]
    chunks = np.arange(T) // (T // 16) + 1
    return {"one": np.ones((B, T)), "several": np.stack(several), "chunks": np.stack([chunks, chunks[::-1]])}


def arrays(seed=0, dtype=jnp.float32):
    """q, k, v and the cotangent of the result. Scores are 10 on average, so that a rounded log-partition shows."""
    shapes = [(N, H), (K, H), (K, VALUE), (N, VALUE)]
    keys = jax.random.split(jax.random.key(seed), 4)
    q, k, v, d_out = (jax.random.normal(key, (B, T, *s)) for key, s in zip(keys, shapes, strict=True))
    level = (10 / SCALE) ** 0.5
    return [a.astype(dtype) for a in (q.at[..., 0].set(level), k.at[..., 0].set(level), v, d_out)]


SINKS = jnp.linspace(4, 16, N)  # from hardly any of the weight to nearly all


def with_gradients(attention, inputs, segments, sinks=None):
    """(out, d_q, d_k, d_v, and of the sinks where there are any)."""
    *qkv, d_out = inputs
    out, back = jax.vjp(lambda *a: attention(*a[:3], segments, sinks=a[3]), *qkv, sinks)
    return out, *back(d_out)


def assert_equals_reference(
    C, context, window, documents, implementation="xla", dtype=jnp.float32, tolerance=1e-5, softcap=0.0, sinks=None
):
    """On rows of every kind by one program."""
    spec, inputs = MeshSpec(context=C), arrays(dtype=dtype)
    rule = {"scale": SCALE, "window": window, "softcap": softcap}
    options = {"rules": Rules.make("zero1", spec), "implementation": implementation, "context": context}
    place = order(C) if context == "ring" else np.arange(T)
    whole = jax.jit(lambda *a: with_gradients(functools.partial(reference, **rule), *a, sinks))
    with jax.set_mesh(mesh_of(spec)):
        sharding = options["rules"].act.spec("batch", "whole_seq")

        def placed(a):
            return jax.device_put(jnp.asarray(a)[:, place], jax.NamedSharding(jax.sharding.get_mesh(), sharding))

        split = jax.jit(lambda *a: with_gradients(functools.partial(packed_attention, **rule, **options), *a, sinks))
        got = {kind: split([placed(a) for a in inputs], placed(ids)) for kind, ids in documents.items()}
        got = jax.tree.map(np.asarray, got)
    exact = [np.asarray(a, np.float32) for a in inputs]
    for kind, ids in documents.items():
        *expected, of_sinks = whole(exact, jnp.asarray(ids))
        expected = [*jax.tree.map(lambda a: np.asarray(a)[:, place], expected), of_sinks]
        assert relative_error(got[kind], tuple(expected)) < tolerance, kind


@pytest.mark.sampled(3)
# Float32 sums in another order (measured: up to 2.3e-6).
@pytest.mark.parametrize("C,window", [(2, 0), (4, 0), (8, 0), (4, 5), (4, 20), (8, 3)])
def test_ring_equals_the_reference(C, window):
    assert_equals_reference(C, "ring", window, rows_of_documents())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("C,window", [(2, 0), (4, 0), (8, 0), (4, 20)])  # with 2 kv heads: own ones, and repeated ones
def test_ulysses_equals_the_reference(C, window):
    assert_equals_reference(C, "ulysses", window, rows_of_documents())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("context", ["ring", "ulysses"])
@pytest.mark.parametrize("softcap,window", [(0.0, 20), (8.0, 0)])
def test_soft_caps_and_sinks_cross_devices(context, softcap, window):
    assert_equals_reference(4, context, window, rows_of_documents(), softcap=softcap, sinks=SINKS)


def test_a_chunk_of_queries_at_a_time(monkeypatch):
    monkeypatch.setattr(attention_pair, "SCORE_BYTES", 4 * B * N * (T // 2) * 4)  # four queries see half a row
    assert_equals_reference(2, "ring", 0, rows_of_documents())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window,bias_bytes", [(0, 2**30), (0, 2048), (20, 2048)], ids=["whole", "cut", "window"])
def test_what_cudnn_is_given(window, bias_bytes, monkeypatch):
    """The whole row's result is rounded to bfloat16 on its way to the backward pass (measured: 0.014 to 0.019; 0.049
    where the log-partition is rounded too)."""
    monkeypatch.setattr(attention_pair, "BIAS_BYTES", bias_bytes)
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", contract_forward)
    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_bwd_rule", contract_backward)
    sinks = None if bias_bytes > 2048 else SINKS
    assert_equals_reference(2, "ring", window, rows_of_documents(), "cudnn", jnp.bfloat16, tolerance=0.03, sinks=sinks)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("window,sinks", [(0, None), (20, None), (20, SINKS)])
def test_what_cudnn_is_given_of_whole_rows(window, sinks, monkeypatch):
    """Under a policy that keeps everything no [T, T] of a layer is kept (measured error: 0.012)."""
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", contract_forward)
    monkeypatch.setattr(fused_attention_stablehlo, "_dot_product_attention_bwd_rule", contract_backward)
    assert_equals_reference(1, "ring", window, rows_of_documents(), "cudnn", jnp.bfloat16, tolerance=0.03, sinks=sinks)
    *qkv, _ = arrays(dtype=jnp.bfloat16)
    ids = jnp.ones((B, T), jnp.int32)
    kept = saved_residuals(lambda *a: cudnn(*a, ids, SCALE, window, sinks), *qkv)
    assert kept and not [aval.shape for aval, _ in kept if aval.shape[-2:] == (T, T)]


def contract_scores(q, k, bias, scale, mask_type, window=0):
    """float32 [B, N, T, S]; the causal mask begins at the top left."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * scale
    if bias is not None:
        assert bias.dtype == q.dtype
        scores += bias
    causal = mask_type == fused_attention_stablehlo.MaskType.CAUSAL
    inside = jnp.tril(jnp.ones(scores.shape[2:], bool))
    inside &= ~jnp.tril(inside, -window) if window else True
    return jnp.where(inside | (not causal), scores, -jnp.inf)


def contract_forward(q, k, v, bias=None, *, scale, mask_type, return_residual=False, sliding_window_length=None):
    """out [B, T, N, H]; with `return_residual` (out, log-partition float32 [B, N, T])."""
    scores = contract_scores(q, k, bias, scale, mask_type, sliding_window_length or 0)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v).astype(q.dtype)
    return (out, jax.nn.logsumexp(scores, axis=-1)) if return_residual else out


def contract_backward(scale, seed, dropout, has_bias, mask_type, layout, window, training, residual, kept, d_out):
    q, k, v, bias, *_, lse, out = kept
    assert (dropout, layout, has_bias[1], residual, lse.dtype) == (0, 0, False, False, jnp.float32)
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(contract_scores(q, k, bias if has_bias[0] else None, scale, mask_type, window) - lse[..., None])
    d_out, out = d_out.astype(jnp.float32), out.astype(jnp.float32)
    d_weights = jnp.einsum("btnh,bsnh->bnts", d_out, jnp.repeat(v, group, axis=2))
    d_scores = weights * (d_weights - jnp.einsum("btnh,btnh->bnt", out, d_out)[..., None]) * scale

    def of_kv_heads(letters, a, b):
        each = jnp.einsum(letters, a, b)
        return each.reshape(*each.shape[:2], -1, group, each.shape[-1]).sum(axis=3).astype(q.dtype)

    d_q = jnp.einsum("bnts,bsnh->btnh", d_scores, jnp.repeat(k, group, axis=2)).astype(q.dtype)
    d_k, d_v = of_kv_heads("bnts,btnh->bsnh", d_scores, q), of_kv_heads("bnts,btnh->bsnh", weights, d_out)
    return d_q, d_k, d_v, *[None] * 7


def test_zigzag_gives_each_device_an_early_and_a_late_chunk():
    spec = MeshSpec(context=4)
    with jax.set_mesh(mesh_of(spec)):
        rows = jnp.tile(jnp.arange(16), (2, 1))
        moved = np.asarray(jax.jit(lambda a: zigzag(a, Rules.make("zero1", spec)))(rows))
    assert moved[0].tolist() == [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]


@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 6, 12, 33])
def test_a_meeting_is_left_out_only_when_the_window_sees_nothing_of_it(window):
    C, half = 8, 4
    index, one = order(C).reshape(C, -1), jnp.ones((C, 1, 2 * half))
    needed = set()
    for me, place in itertools.product(range(C), range(1, C)):
        other = (me - place) % C
        distance = index[me][:, None] - index[other][None]
        seen = ((distance >= 0) & (distance < (window or T))).any()
        assert seen == (int(_Ring(C, jnp.int32(me), half, window, one).meeting(other)) != 0)
        needed |= {place} if seen else set()
    assert stops(C, half, window) == sorted(needed)


def test_a_meeting_is_left_out_when_no_document_has_tokens_on_both_sides():
    C, half = 4, 8
    index = order(C).reshape(C, 1, -1)
    left_out = 0
    for row in np.sort(np.random.default_rng(0).integers(1, 6, (10, T))):
        for me, other in itertools.permutations(range(C), 2):
            mine, theirs = row[index[me]].T, row[index[other]]
            seen = ((mine == theirs) & (index[other] <= index[me].T)).any()
            assert seen == (int(_Ring(C, jnp.int32(me), half, 0, jnp.asarray(row[index])).meeting(other)) != 0)
            left_out += not seen
    assert left_out > 20
