"""Causal self-attention inside a batch of packed rows: the reference, and the choice between cudnn_attention.py and the
XLA implementation in blocked_attention.py. Attention over a paged cache is in paged_attention.py."""

import functools
from collections.abc import Iterable
from typing import Literal

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec, shard_map
from shardlm.ops.blocked_attention import MASKED, blocked_attention
from shardlm.ops.cudnn_attention import cudnn
from shardlm.ops.cudnn_heads import LATENT, Gpu, takes
from shardlm.ops.head_rows import by_heads, from_heads
from shardlm.ops.ring_attention import ring_attention
from shardlm.ops.ulysses import fits as ulysses_fits
from shardlm.ops.ulysses import ulysses
from shardlm.rules import Rules

Implementation = Literal["auto", "xla", "cudnn"]
ContextAttention = Literal["auto", "ring", "ulysses"]


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, softcap: float = 0.0, sinks=None
) -> jax.Array:
    """Softmax attention with grouped heads, scores in float32 (https://arxiv.org/abs/1706.03762, eq. 1).

    q [B, T, N, H], k [B, S, K, H], v [B, S, K, Hv] with N a multiple of K, mask bool [B, T, S] (True: may attend);
    returns [B, T, N, Hv] in q's dtype. With `softcap` scores are softcap * tanh(scores / softcap); `sinks` [N] are a
    score of each head that takes weight and gives no value.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * scale
    if softcap:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None, None], scores, MASKED)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]].astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, v.shape[-1])


def packed_mask(segment_ids: jax.Array, window: int = 0) -> jax.Array:
    """Causal mask that keeps packed documents apart: segment_ids int32 [B, T] -> bool [B, T, T]. A token sees `window`
    positions, itself included; 0: all."""
    T = segment_ids.shape[1]
    distance = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    seen = (distance >= 0) & (distance < (window or T))
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & seen


def reference(q, k, v, segment_ids: jax.Array, scale: float, window: int = 0, softcap: float = 0.0, sinks=None):
    """Causal attention within segments, all scores materialised. Shapes as in `attend`, segment_ids int32 [B, T]."""
    return attend(q, k, v, packed_mask(segment_ids, window), scale, softcap, sinks)


def of_rows(q, k, v, scale: float, window: int, implementation: str, sinks: jax.Array | None = None) -> jax.Array:
    """Causal attention of rows of one document each, which padding may follow, on one device's arrays, by "cudnn" or
    "xla"; shapes as in `attend`."""
    if implementation == "cudnn":
        return cudnn(q, k, v, None, scale, window, sinks)
    return blocked_attention(q, k, v, jnp.ones(q.shape[:2], jnp.int32), scale, window, sinks=sinks)


def choose(
    implementation: Implementation,
    device: Gpu,
    dtype: jnp.dtype,
    heads: Iterable[tuple[int, int]],
    capped: bool = False,
    trained: bool = True,
) -> str:
    """The implementation that runs on devices like this one: cuDNN on a GPU for 16-bit types and head sizes it has
    kernels for, else XLA. `heads` are (head_dim, value_dim) of all layers, `capped` says that one has a softcap, which
    cuDNN does not know, `trained` that gradients are made. Raises ShardlmError for cuDNN where one is `capped`.
    """
    if implementation == "cudnn" and capped:
        raise ShardlmError("attention=cudnn has no kernel for soft-capped scores; choose attention=xla")
    if implementation != "auto":
        return implementation
    refused = [pair for pair in heads if not takes(device, *pair, trained)]
    if device.platform not in ("gpu", "cuda"):
        chosen, why = "xla", f"platform is {device.platform}"
    elif capped:
        chosen, why = "xla", "cuDNN has no kernel for soft-capped scores"
    elif jnp.dtype(dtype).itemsize != 2 or refused:
        chosen, why = "xla", f"cuDNN has no kernel for {jnp.dtype(dtype)} with heads (of keys, of values) {refused}"
    else:
        chosen, why = "cudnn", "a GPU, a 16-bit type and a supported head size"
    logging.vlog(1, "attention: %s, because %s", chosen, why)
    return chosen


MASK_BYTES = 2**30  # of the mask that keeps documents apart in a whole row


def choose_context(choice: ContextAttention, num_heads: int, num_kv_heads: int, seq_len: int, mesh: MeshSpec) -> str:
    """How attention crosses the context axis: "ulysses" where each device gets whole heads, since it moves q, k, v and
    the output once and runs one kernel on whole rows; "ring" where heads are too few, or rows so long that the mask of
    a whole one is too large (Llama 3 8B, 131,072 tokens over 8 H100: 77 GiB of temporaries by Ulysses, 14 by a ring;
    compiled)."""
    if choice != "auto":
        return choice
    if 2 * seq_len**2 > MASK_BYTES:
        return "ring"
    local = max(1, num_heads // mesh.tensor), max(1, num_kv_heads // mesh.tensor)
    return "ulysses" if ulysses_fits(*local, mesh.context) else "ring"


def packed_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    *,
    scale: float,
    rules: Rules,
    implementation: str,
    window: int = 0,
    softcap: float = 0.0,
    sinks: jax.Array | None = None,
    context: str = "ring",
    chosen: jax.Array | None = None,
    until: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within segments on any mesh. `implementation` is "xla" or "cudnn" (see `choose`).

    q [B, T, N, H], k [B, T, K, H] and v [B, T, K, Hv], batch, sequence and heads split as the activation rules say;
    returns [B, T, N, Hv]. Where the sequence is split, `context` is "ulysses", with tokens in natural order, or "ring",
    with tokens in zigzag order (ring_attention.py). `softcap`, not with cuDNN, and `sinks` [N] as in `attend`. `chosen`
    bool [B, T, T], of whole rows on each device and not with a ring: the keys that each query attends to; [B, K, T, T]
    those of each kv head, with whole rows alone. `until` int32 [B, T], of whole rows and not with a ring: the place in
    its row of the last key that each token sees, which is XLA's work, as cuDNN has no such mask.
    """
    implementation = implementation if until is None else "xla"
    heads = rules.act.spec("batch", "whole_seq", "heads", "head_dim")
    options = {"scale": scale, "window": window} | ({"softcap": softcap} if softcap else {})
    whole = functools.partial(cudnn if implementation == "cudnn" else blocked_attention, **options)
    if not rules.act.axes("whole_seq"):
        run = whole
    elif context == "ulysses":
        run = functools.partial(ulysses, attend=whole)
    else:
        run = functools.partial(ring_attention, implementation=implementation, **options)

    def local(q, k, v, segment_ids, sinks, chosen, until):
        rest = {name: a for name, a in (("chosen", chosen), ("until", until)) if a is not None}
        if chosen is not None and chosen.ndim == 4:
            q, *of_keys, segment_ids = by_heads(q, k, v, segment_ids)
            out = run(q, *of_keys, segment_ids, chosen=chosen.reshape(-1, *chosen.shape[2:]))
            return from_heads(out, chosen.shape[1])
        return run(q, k, v, segment_ids, sinks=sinks, **rest)

    of_each = chosen is not None and chosen.ndim == 4
    rows, each = rules.act.spec("batch", "whole_seq"), rules.act.spec("batch", *("kv_heads",) * of_each, None, None)
    specs = (heads, heads, heads, rows, rules.act.spec("heads"), each, rules.act.spec("batch", None))
    value_dim = v.shape[-1]
    # Of cuDNN's kernels for narrower values not every version has those of other sizes.
    if implementation == "cudnn" and value_dim < q.shape[-1] and (q.shape[-1], value_dim) != LATENT:
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - value_dim)])
    chosen = jax.reshard(chosen, each) if of_each else chosen
    until = None if until is None else jax.reshard(until, rules.act.spec("batch", None))
    out = shard_map(local, in_specs=specs, out_specs=heads)(q, k, v, segment_ids, sinks, chosen, until)
    return out[..., :value_dim]
