"""What stands in for cuDNN's kernels, which a CPU has not: what jax says of their arguments, and how jax itself makes
of them what cuDNN takes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused


class Call(NamedTuple):
    mask: fused.MaskType
    bias: bool
    shape: tuple[int, ...]  # of queries, [B, T, N, H]
    kv_heads: int
    most: int  # documents a row, as it is told of


def stand_in(monkeypatch) -> list[Call]:
    """In place of jax's calls; what is called, as it is traced."""
    calls: list[Call] = []
    monkeypatch.setattr(fused, "dot_product_attention", functools.partial(_forward, calls))
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_rule", functools.partial(_backward, calls))
    monkeypatch.setattr(fused, "check_compute_capability", lambda wanted: True)
    monkeypatch.setattr(fused, "get_large_negative_number", lambda dtype: jnp.asarray(-1e30, dtype))
    return calls


def _most(lengths) -> int:
    return lengths.shape[1] if lengths is not None and lengths.ndim == 2 else 1


def _sequences(q, k, lengths, starts):
    """(the sequence of each token of all rows, its place there), as cuDNN is told them by jax."""
    (B, T, N, H) = q.shape
    lengths, _, starts, _ = fused._fix_seqlen_offsets(lengths, lengths, starts, starts, q, k)
    lengths, starts = lengths.reshape(-1), starts.reshape(-1)[: lengths.size] // (N * H)
    token = jnp.arange(B * T)
    inside = (starts[:, None] <= token) & (token < starts[:, None] + lengths[:, None])
    number = jnp.argmax(inside, axis=0)
    return number, token - starts[number]


def _forward(calls, q, k, v, bias, *, scale, mask_type, return_residual, **placed):
    """The forward call: what it gives of each sequence, and of all rows where there are none."""
    (B, T, N, _), K = q.shape, k.shape[2]
    calls.append(Call(mask_type, bias is not None, q.shape, k.shape[2], _most(placed.get("q_seqlen"))))
    shape, (q, k, v) = q.shape, (q, *(jnp.repeat(a, N // K, axis=2) for a in (k, v)))
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * scale
    seen = jnp.tril(jnp.ones((T, T), bool))[None]
    if placed:
        assert list(placed) == ["q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"]
        assert placed["q_seqlen"] is placed["kv_seqlen"] and placed["q_offsets"] is placed["kv_offsets"]
        number, place = _sequences(q, k[:, :, :K], placed["q_seqlen"], placed["q_offsets"])
        rows = number.reshape(B, T)
        seen = seen & (rows[:, :, None] == rows[:, None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf) + (0 if bias is None else bias)
    lse = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bnqk,bknh->bqnh", jnp.exp(scores - lse[..., None]), v).reshape(shape)
    if placed:
        flat = lse.transpose(0, 2, 1).reshape(B * T, N)
        lse = jnp.full((placed["q_seqlen"].size, N, T), jnp.nan).at[number, :, place].set(flat)
    return (out, lse) if return_residual else out


def _backward(calls, scale, *settings):
    """The backward call: under the log-partition that it is given."""
    kind, (q, k, v, bias, *placed, lse, _), d_out = settings[3], settings[-2], settings[-1]
    (B, T, N, _), K = q.shape, k.shape[2]
    calls.append(Call(kind, bias.size > 0, q.shape, K, _most(placed[0])))
    if kind == fused.MaskType.PADDING_CAUSAL:
        number, place = _sequences(q, k, placed[0], placed[2])
        lse = lse[number, :, place].reshape(B, T, N).transpose(0, 2, 1)
    seen = jnp.tril(jnp.ones((T, T), bool))[None]
    if kind == fused.MaskType.PADDING_CAUSAL:
        rows = number.reshape(B, T)
        seen = seen & (rows[:, :, None] == rows[:, None])

    def out(q, k, v):
        k, v = (jnp.repeat(a, N // K, axis=2) for a in (k, v))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * scale + (bias if bias.size else 0)
        own = jax.nn.logsumexp(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1, keepdims=True)
        weights = jnp.where(seen[:, None], jnp.exp(scores - own), 0)
        return jnp.einsum("bnqk,bknh->bqnh", weights, v), own[..., 0]

    (_, own), pull = jax.vjp(out, q, k, v)
    wrong = jnp.abs(own - lse).max() > 1e-4  # of any token: NaN, and so all gradients
    return *jax.tree.map(lambda a: jnp.where(wrong, jnp.nan, a), pull((d_out, jnp.zeros_like(own)))), None
