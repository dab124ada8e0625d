"""cuDNN's flash attention on one device's arrays: its calls with a bias, forwards and backwards, and causal attention
of packed rows made of them. jax's own differentiation of these calls keeps the bias for the backward pass and asks the
kernel for its gradient, as large again, of which nothing is made: [B, 1, T, T], 128 MiB a row of 8,192 tokens.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo

from shardlm.ops.sinks import gradient_of_sinks, with_sinks


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
    [B, T] -> [B, T, N, Hv]. Scores are never materialised; packed documents are kept apart by a bias on top of the
    causal mask, whose upper half cuDNN skips. Without `segment_ids` a row is one document. `sinks` [N]: sinks.py.
    `chosen` bool [B, T, T], in place of segments: the keys that each query attends to, all of which are computed."""
    return _attend(q, k, v, segment_ids, chosen, sinks, scale, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _attend(q, k, v, segment_ids, chosen, sinks, scale, window):
    if sinks is not None:
        return _forward(q, k, v, segment_ids, chosen, sinks, scale, window)[0]
    options = {"scale": scale, "mask_type": _mask_type(True), "sliding_window_length": window or None}
    return fused_attention_stablehlo.dot_product_attention(q, k, v, _bias(segment_ids, chosen, q.dtype), **options)


def _forward(q, k, v, segment_ids, chosen, sinks, scale, window):
    out, lse = forward(q, k, v, _bias(segment_ids, chosen, q.dtype), scale, causal=True, window=window)
    if sinks is not None:
        out, rows = with_sinks(out, lse.transpose(0, 2, 1), sinks)
        lse = rows.transpose(0, 2, 1)
    return out, (q, k, v, segment_ids, chosen, sinks, out, lse)


def _backward(scale, window, kept, d_out):
    q, k, v, segment_ids, chosen, sinks, out, lse = kept
    bias = _bias(segment_ids, chosen, q.dtype)
    gradients = backward(q, k, v, bias, out, lse, d_out, scale, causal=True, window=window)
    return *gradients, None, None, gradient_of_sinks(sinks, out, lse.transpose(0, 2, 1), d_out)


_attend.defvjp(_forward, _backward)


def _bias(segment_ids: jax.Array | None, chosen: jax.Array | None, dtype) -> jax.Array | None:
    """Of what is chosen, or of the documents of whole rows."""
    if chosen is not None:
        return bias_of(chosen, dtype)
    return None if segment_ids is None else bias_of(segment_ids[:, :, None] == segment_ids[:, None, :], dtype)


def bias_of(seen: jax.Array, dtype) -> jax.Array:
    """What hides the keys that are not seen: bool [B, T, S] -> [B, 1, T, S]. By a product: jax moves the zeros and the
    lowest numbers that a `where` chooses from, [B, T, S] each, out of the loop over layers, where remat=none keeps all
    that does not depend on them."""
    lowest = fused_attention_stablehlo.get_large_negative_number(dtype)
    return (~seen).astype(dtype)[:, None] * lowest


def forward(q, k, v, bias, scale: float, causal: bool, window: int = 0) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, N, Hv], log-partition float32 [B, N, T]). Not by jax.nn.dot_product_attention, which rounds the
    log-partition to q's type: by up to 0.03 in bfloat16 from 8 on, and so the weights of a pair of blocks by 3%."""
    options = {"scale": scale, "mask_type": _mask_type(causal), "return_residual": True}
    sliding = {"sliding_window_length": window} if window else {}
    return fused_attention_stablehlo.dot_product_attention(q, k, v, bias, **options, **sliding)


def backward(q, k, v, bias, out, lse, d_out, scale: float, causal: bool, window: int = 0):
    """(d_q, d_k, d_v) under a log-partition float32 [B, N, T], which jax.nn has no function for."""
    none, no_index = jnp.zeros(0, q.dtype), jnp.zeros(0, jnp.int32)
    bias_in, bias_gradient = bias is not None, False
    rule = fused_attention_stablehlo._dot_product_attention_bwd_rule
    # From jax 0.12 on scores may be changed by a function with arguments, of which there are none here.
    changes = "score_mod" in inspect.signature(rule).parameters
    settings = (scale, 42, 0.0, (bias_in, bias_gradient), _mask_type(causal), 0, window, *[None] * changes, True, False)
    kept = (q, k, v, bias if bias_in else none, *[no_index] * 6, *[()] * changes, lse, out.astype(q.dtype))
    return rule(*settings, kept, d_out.astype(q.dtype))[:3]


def _mask_type(causal: bool):
    kinds = fused_attention_stablehlo.MaskType
    return kinds.CAUSAL if causal else kinds.NO_MASK
