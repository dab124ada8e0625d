"""Attention in both directions, among the patches of one image: the reference, and a block of queries at a time, so
that memory does not grow with the square of the patches."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.mesh import shard_map
from shardlm.ops.attention import attend
from shardlm.ops.cudnn_attention import backward, forward

BLOCK_BYTES = 2**27  # of one block's scores


def reference(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, count: jax.Array, windows: jax.Array | None = None
) -> jax.Array:
    """Softmax attention of each patch to all (https://arxiv.org/abs/1706.03762, eq. 1), scores in float32.

    q, k, v [P, N, H]; count int32, the patches that there are, of which the first rows are; windows int32 [P]: a patch
    attends to those of its own number, None: to all. Returns [P, N, H] in q's dtype; rows from `count` on are any.
    """
    return _attend(q, k, v, scale, count, windows, windows)


def full_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, count: jax.Array, implementation: str = "xla"
) -> jax.Array:
    """The same of all to all, by "cudnn" in 16 bits, where scores are never written, or by "xla" in blocks of queries.
    K heads of keys and values [P, K, H] may be fewer."""
    if implementation == "cudnn":
        return _by_cudnn(q[None], k[None], v[None], scale, jnp.maximum(count, 1)[None])[0]
    P, N, H = q.shape
    size = _block(P, N)
    if size == P:
        return reference(q, k, v, scale, count)
    blocks = q.reshape(P // size, size, N, H)
    return jax.lax.map(lambda block: _attend(block, k, v, scale, count), blocks).reshape(P, N, H)


def in_tiles(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, size: int, implementation: str = "xla"
) -> jax.Array:
    """The same of rows that are tiles of `size`, inside of which they attend, one after the other: [P, N, H]."""
    tiles = tuple(a.reshape(-1, size, *a.shape[1:]) for a in (q, k, v))
    if implementation == "cudnn":
        return _by_cudnn(*tiles, scale).reshape(q.shape)
    return jax.lax.map(lambda tile: full_attention(*tile, scale, jnp.int32(size)), tiles).reshape(q.shape)


def _by_cudnn(q, k, v, scale: float, lengths: jax.Array | None = None) -> jax.Array:
    """[B, P, N, H], all of it on each device; of `lengths` int32 [B] keys, None: of all."""

    run = shard_map(functools.partial(_cudnn, scale), in_specs=PartitionSpec(), out_specs=PartitionSpec())
    return run(q, k, v) if lengths is None else run(q, k, v, lengths)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cudnn(scale: float, q, k, v, lengths=None) -> jax.Array:
    return forward(q, k, v, None, scale=scale, causal=False, trained=False, lengths=lengths)[0]


def _cudnn_forward(scale, q, k, v, lengths=None):
    out, lse = forward(q, k, v, None, scale=scale, causal=False, lengths=lengths)
    return out, (q, k, v, lengths, out, lse)


def _cudnn_backward(scale, kept, d_out):
    q, k, v, lengths, out, lse = kept
    return *backward(q, k, v, None, out, lse, d_out, scale=scale, causal=False, lengths=lengths), None


_cudnn.defvjp(_cudnn_forward, _cudnn_backward)


def _block(patches: int, heads: int) -> int:
    """Queries of a block: they divide the patches."""
    most = max(1, BLOCK_BYTES // (4 * patches * heads))
    return next(size for size in range(min(most, patches), 0, -1) if patches % size == 0)


def _attend(q, k, v, scale, count, of_queries=None, of_keys=None) -> jax.Array:
    seen = jnp.broadcast_to(jnp.arange(k.shape[0]) < count, (q.shape[0], k.shape[0]))
    if of_keys is not None:
        seen &= of_queries[:, None] == of_keys[None]
    return attend(q[None], k[None], v[None], seen[None], scale)[0]
