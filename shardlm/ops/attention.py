"""Causal self-attention inside a batch of packed rows: the reference, cuDNN's flash attention, and the choice between
cuDNN and the XLA implementation in blocked_attention.py. Attention over a paged cache is in paged_attention.py."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.mesh import shard_map
from shardlm.ops.blocked_attention import MASKED, blocked_attention
from shardlm.rules import Rules

Implementation = Literal["auto", "xla", "cudnn"]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """Softmax attention with grouped heads, scores in float32 (https://arxiv.org/abs/1706.03762, eq. 1).

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv] with N a multiple of K, mask bool [B, T, S] (True: may attend);
    returns [B, T, N, Hv] in q's dtype.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, v.shape[-1])


def packed_mask(segment_ids: jax.Array) -> jax.Array:
    """Causal mask that keeps packed documents apart: segment_ids int32 [B, T] -> bool [B, T, T]."""
    T = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & causal


def reference(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float) -> jax.Array:
    """Causal attention within segments, all scores materialised. Shapes as in `attend`, segment_ids int32 [B, T]."""
    return attend(q, k, v, packed_mask(segment_ids), scale)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float) -> jax.Array:
    """cuDNN flash attention on one device's arrays, float16 or bfloat16. Scores are never materialised; packed
    documents are kept apart by a mask [B, 1, T, T] on top of the causal mask, whose upper half cuDNN skips."""
    same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, scale=scale, implementation="cudnn")


def choose(implementation: Implementation, platform: str, dtype: jnp.dtype, head_dim: int) -> str:
    """The implementation that runs: cuDNN on a GPU for 16-bit types and head sizes it has kernels for, else XLA."""
    if implementation != "auto":
        return implementation
    wide = jnp.dtype(dtype).itemsize != 2
    if platform not in ("gpu", "cuda"):
        chosen, why = "xla", f"platform is {platform}"
    elif wide or head_dim % 8 or head_dim > 256:
        chosen, why = "xla", f"cuDNN has no kernel for {jnp.dtype(dtype)} with head_dim={head_dim}"
    else:
        chosen, why = "cudnn", "a GPU, a 16-bit type and a supported head size"
    logging.vlog(1, "attention: %s, because %s", chosen, why)
    return chosen


def packed_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, scale: float, rules: Rules, implementation: str
) -> jax.Array:
    """Causal attention within segments on any mesh. `implementation` is "xla" or "cudnn" (see `choose`).

    q [B, T, N, H], k and v [B, T, K, H], batch and heads split as the activation rules say; returns q's shape.
    """
    heads = rules.act.spec("batch", "whole_seq", "heads", "head_dim")
    run = functools.partial(cudnn if implementation == "cudnn" else blocked_attention, scale=scale)
    specs = (heads, heads, heads, rules.act.spec("batch", "whole_seq"))
    return shard_map(run, in_specs=specs, out_specs=heads)(q, k, v, segment_ids)
