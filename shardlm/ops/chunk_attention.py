"""Attention of chunks of texts whose beginnings are in pages, in two parts: the tokens of a chunk to each other, and to
what lies before them, no mask but lengths, a block of gathered pages at a time. Parts are merged by their
log-partitions, as in ring attention. cuDNN's flash attention reaches 633 TFLOP/s in causal rows on an H200, the kernel
that reads pages where they lie 222 in 2,048 tokens of 8,192 (measured); what is gathered is written and read once more,
8 KiB a position and row of 8 kv heads of 128: 3% of the products of 2,048 tokens at 4.8 TB/s, 13% of 512 (counted).

The first block is attended to without asking whether there is one; for the others, where a row may have any, the host
waits for the device once a block, to hear whether it is the last. Blocks bound what is gathered at a time whatever the
longest text is: at once it would be 0.5 GiB a row for 131,072 positions, or a program for each width.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from shardlm.ops import attention_pair, cudnn_attention
from shardlm.ops.attention_pair import Pair, Side, merge
from shardlm.ops.blocked_attention import MASKED
from shardlm.ops.kv_format import numbers_of, order_of
from shardlm.ops.paged_attention import PagedAttention
from shardlm.ops.sinks import with_sinks

# Of a block: with fewer positions a merge (84 MB of 2,048 tokens, 17 us) and a wait (10 to 20 us) are more beside the
# 434 us of products, with more a short beginning is padded for longer (14 us by 8,192 positions; estimated, H200).
BLOCK_KEYS = 8192
BLOCK_BYTES = 128 * 2**20  # of the keys and values of a block, in all rows


def in_parts(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: Mapping[str, jax.Array],
    page_table: jax.Array,
    start: jax.Array,
    first_page: jax.Array,
    scale: float,
    implementation: str,
    *,
    sinks: jax.Array | None = None,
    head: jax.Array | None = None,
    held_for: PagedAttention = "pallas",
) -> jax.Array:
    """Each token attends to those of its row up to itself, and to the `start` int32 [B] positions before the row.

    q [B, T, N, H], k [B, T, K, H], v [B, T, K, Hv] of this chunk; pages "k" and "v" as `held_for` has them
    (kv_format.py), page_table int32 [B, W] counting from `first_page`; `implementation` as in ops/attention.py; `sinks`
    [N]; `head`: the only one of the pools' kv heads that is attended to, where K is 1. Returns [B, T, N, Hv]. Tokens of
    padding, behind those of their row, get any finite numbers."""
    page_size = pages["k"].shape[order_of("k", pages["k"].dtype, held_for).index("s")]
    numbers = k.shape[2] * (k.shape[3] + v.shape[3])
    positions = block_positions(q.shape[0], numbers * q.dtype.itemsize)
    count = min(page_table.shape[1], max(1, positions // page_size))  # pages of a block
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % count)))

    def gathered(name: str, some: jax.Array, like: jax.Array) -> jax.Array:
        """[B, positions, K, H or Hv]."""
        order = order_of(name, pages[name].dtype, held_for)
        held = numbers_of(pages[name][some + first_page], None, q.dtype)
        held = jnp.einsum(f"b{order}->bpskh", held)
        held = held if head is None else jnp.take(held, head[None], axis=3)
        return held.reshape(held.shape[0], -1, *held.shape[3:])[..., : like.shape[-1]]

    def with_block(i: jax.Array | int, found):
        some = jax.lax.dynamic_slice_in_dim(table, i * count, count, axis=1)
        there = (i * count + jnp.arange(count)) * page_size < start[:, None]
        some = jnp.where(there, some, 0)  # scrap, of zeros: what texts before left in others may be no finite numbers
        lengths = jnp.clip(start - i * count * page_size, 0, count * page_size)
        kv = gathered("k", some, k), gathered("v", some, v)
        return merge(found, _before(q, *kv, lengths, scale, implementation))

    found = with_block(0, _own(q, k, v, scale, implementation))
    if table.shape[1] > count:
        stop = -(-jnp.max(start) // (count * page_size))
        found = jax.lax.fori_loop(1, stop, with_block, found)
    return with_sinks(*found, sinks)[0].astype(q.dtype)


def block_positions(rows: int, nbytes: int) -> int:
    """Of a block that is gathered at a time, for so many rows and bytes of a position's keys and values."""
    return min(BLOCK_KEYS, BLOCK_BYTES // (rows * nbytes))


def _own(q, k, v, scale: float, implementation: str) -> tuple[jax.Array, jax.Array]:
    """Of the tokens of a chunk to each other: (out [B, T, N, Hv], log-partition [B, T, N]), both float32."""
    if implementation == "cudnn":
        return _as_float32(*cudnn_attention.forward(q, k, v, None, scale=scale, causal=True))
    side = Side(jnp.arange(q.shape[1]), jnp.ones(q.shape[:2], jnp.int32))
    return attention_pair.forward(Pair(scale, True, 0, implementation), q, k, v, side, side)


def _before(q, k, v, lengths: jax.Array, scale: float, implementation: str) -> tuple[jax.Array, jax.Array]:
    """The same of the first `lengths` int32 [B] of keys and values [B, S, K, ...]; where these are none, no weight."""
    least = jnp.maximum(lengths, 1)  # a softmax over nothing is NaN, or whatever a version of cuDNN makes of it
    if implementation == "cudnn":
        out, lse = _as_float32(*cudnn_attention.forward(q, k, v, None, scale=scale, causal=False, lengths=least))
    else:
        index = jnp.arange(k.shape[1])
        keys = Side(index, (index < least[:, None]).astype(jnp.int32))
        queries = Side(jnp.arange(q.shape[1]), jnp.ones(q.shape[:2], jnp.int32))
        out, lse = attention_pair.forward(Pair(scale, False, 0, implementation), q, k, v, queries, keys)
    return out, jnp.where((lengths > 0)[:, None, None], lse, MASKED)


def _as_float32(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    return out.astype(jnp.float32), lse.transpose(0, 2, 1)
