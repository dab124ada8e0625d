"""cuDNN's flash attention on one device's arrays: its calls, with a bias or the places of documents, forwards and
backwards, and causal attention of packed rows made of them. jax's own differentiation of these calls keeps the bias for
the backward pass and asks the kernel for its gradient, as large again, of which nothing is made: [B, 1, T, T], 128 MiB
a row of 8,192 tokens.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo
from jax.ad_checkpoint import checkpoint_name

from shardlm.ops.cudnn_documents import Documents, by_document, levels, most_documents, of_rows
from shardlm.ops.cudnn_groups import Rows, by_groups
from shardlm.ops.sinks import gradient_of_sinks, with_sinks

Result = TypeVar("Result")
HEADS = "attention_heads"  # what the kernel gives, by which a policy of jax.checkpoint keeps it


def cudnn(
    q,
    k,
    v,
    segment_ids: jax.Array | None,
    scale: float,
    window: int = 0,
    sinks: jax.Array | None = None,
    chosen: jax.Array | None = None,
) -> jax.Array:
    """Causal attention in float16 or bfloat16: q [B, T, N, H], k [B, T, K, H], v [B, T, K, Hv] and segment_ids int32
    [B, T] -> [B, T, N, Hv]. Scores are never materialised. Without `segment_ids` a row is one document. With them the
    device chooses: nothing more where each of its rows is one, sequences where there are few (cudnn_documents.py), and
    a bias on top of the causal mask for many, with which the kernel takes twice as long. Forward and gradients of 4
    rows of 8,192 tokens, 32 heads of 128 and 8 kv heads (H200, measured): of one document 15.1 ms, of eight 7.4, of
    thirty 16.1, with a bias 33.5. `sinks` [N]: sinks.py. `chosen` bool [B, T, T], in place of segments: the keys that
    each query attends to, all of which are computed."""
    return _attend(q, k, v, segment_ids, chosen, sinks, scale, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q, k, v, segment_ids, chosen, sinks, scale, window):
    if sinks is not None:
        return _forward(q, k, v, segment_ids, chosen, sinks, scale, window)[0]
    run = functools.partial(forward, scale=scale, causal=True, window=window, trained=False)
    return _apart(run, segment_ids, chosen, window, q, k, v)[0]


def _forward(q, k, v, segment_ids, chosen, sinks, scale, window):
    run = functools.partial(forward, scale=scale, causal=True, window=window)
    found = _apart(run, segment_ids, chosen, window, q, k, v)
    out, lse = (checkpoint_name(a, HEADS) for a in found)
    if sinks is not None:
        out, rows = with_sinks(out, lse.transpose(0, 2, 1), sinks)
        lse = rows.transpose(0, 2, 1)
    return out, (q, k, v, segment_ids, chosen, sinks, out, lse)


def _backward(scale, window, kept, d_out):
    q, k, v, segment_ids, chosen, sinks, out, lse = kept
    run = functools.partial(backward, scale=scale, causal=True, window=window)
    gradients = _apart(run, segment_ids, chosen, window, q, k, v, out, lse, d_out)
    return *gradients, None, None, gradient_of_sinks(sinks, out, lse.transpose(0, 2, 1), d_out)


_attend.defvjp(_forward, _backward)


def _apart(run: Callable[..., Result], segment_ids, chosen, window: int, q, k, v, *rest) -> Result:
    """run(q, k, v, bias, *rest, where=) with a bias of what is chosen; of documents without one where each row is one,
    with their places where there are few, gradients (which have a `rest`) a group at a time, and else with a bias."""
    if chosen is not None:
        return run(q, k, v, bias_of(chosen, q.dtype), *rest)
    if segment_ids is None:
        return run(q, k, v, None, *rest)
    most = Rows.of(q, k, v).bounded(levels(q.shape[1], q.shape[3], v.shape[3], window))
    where = Documents.of(segment_ids, most[-1]) if most else None

    def one(ids, where, *rows):
        return run(*rows[:3], None, *rows[3:])

    def some(count, ids, where, *rows):
        if rest:
            return by_groups(run, count, ids, where.few(count), *rows)
        return run(*rows, None, where=where.few(count))

    def many(ids, where, *rows):
        return run(*rows[:3], bias_of(ids[:, :, None] == ids[:, None, :], q.dtype), *rows[3:])

    ways, found = [one, *(functools.partial(some, count) for count in most), many], most_documents(segment_ids)
    way = sum((found > limit).astype(jnp.int32) for limit in (1, *most))  # a constant array is more than remat counts
    return jax.lax.switch(way, ways, segment_ids, where, q, k, v, *rest)


def bias_of(seen: jax.Array, dtype) -> jax.Array:
    """What hides the keys that are not seen: bool [B, T, S] -> [B, 1, T, S]. By a product: jax moves the zeros and the
    lowest numbers that a `where` chooses from, [B, T, S] each, out of the loop over layers, where remat=none keeps all
    that does not depend on them."""
    lowest = fused_attention_stablehlo.get_large_negative_number(dtype)
    return (~seen).astype(dtype)[:, None] * lowest


def forward(
    q,
    k,
    v,
    bias,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
    where: Documents | None = None,
    trained: bool = True,
    lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """(out [B, T, N, Hv], log-partition float32 [B, N, T], None where nothing is `trained`), of the documents `where`
    there are several. `lengths` int32 [B], at least 1 each and not causal: only so many keys of a row are seen. Not by
    jax.nn.dot_product_attention, which rounds the log-partition to q's type: by up to 0.03 in bfloat16 from 8 on, and
    so the weights of a pair of blocks by 3%."""
    placed, mask = where.named if where else {}, _mask_type(causal, where)
    if lengths is not None:
        assert not causal and where is None, "its causal mask begins at the first key"
        mask = fused_attention_stablehlo.MaskType.PADDING
        placed = {"q_seqlen": jnp.full(q.shape[:1], q.shape[1], jnp.int32), "kv_seqlen": lengths}
    options = {"scale": scale, "mask_type": mask, "return_residual": trained}
    sliding = {"sliding_window_length": window} if window else {}
    found = fused_attention_stablehlo.dot_product_attention(q, k, v, bias, **placed, **options, **sliding)
    if not trained:
        return found, None
    out, lse = found
    return out, lse if where is None else of_rows(lse, where)


def backward(
    q,
    k,
    v,
    bias,
    out,
    lse,
    d_out,
    *,
    scale: float,
    causal: bool,
    window: int = 0,
    where: Documents | None = None,
    lengths: jax.Array | None = None,
):
    """(d_q, d_k, d_v) under a log-partition float32 [B, N, T], which jax.nn has no function for; `lengths` as in
    `forward`."""
    none, no_index = jnp.zeros(0, q.dtype), jnp.zeros(0, jnp.int32)
    bias_in, bias_gradient = bias is not None, False
    rule = fused_attention_stablehlo._dot_product_attention_bwd_rule
    # From jax 0.12 on scores may be changed by a function with arguments, of which there are none here.
    changes = "score_mod" in inspect.signature(rule).parameters
    kind = _mask_type(causal, where) if lengths is None else fused_attention_stablehlo.MaskType.PADDING
    settings = (scale, 42, 0.0, (bias_in, bias_gradient), kind, 0, window, *[None] * changes, True, False)
    placed, lse = (where.named.values(), by_document(lse, where)) if where else ([no_index] * 4, lse)
    if lengths is not None:
        placed = [jnp.full(q.shape[:1], q.shape[1], jnp.int32), lengths, no_index, no_index]
    kept = (q, k, v, bias if bias_in else none, *placed, no_index, no_index, *[()] * changes, lse, out.astype(q.dtype))
    return rule(*settings, kept, d_out.astype(q.dtype))[:3]


def _mask_type(causal: bool, where: Documents | None = None):
    kinds = fused_attention_stablehlo.MaskType
    if where is not None:
        return kinds.PADDING_CAUSAL
    return kinds.CAUSAL if causal else kinds.NO_MASK
