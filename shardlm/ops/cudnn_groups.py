"""What cuDNN's attention takes beside its arrays while it makes gradients, and documents' gradients made of a few rows
or heads at a time, so that it is little. The kernel sums gradients of queries in float32, and keeps those of keys and
values by query head where heads share them; for documents XLA asks for as much of each as if it were as long as a row,
so that 32 in a row would take 32 times what one takes. XLA hears of it from cuDNN, and counts none where it compiles
without a GPU. 8 rows of 4,096 tokens, 32 heads of 64 and 8 kv heads (H200, measured):

    of 8 documents   4.0 GiB and 1.64 ms at once, 1.0 and 2.40 in 4 calls, 0.5 and 2.61 in 8
    of 30            16 GiB and 3.05 ms at once, 1.0 and 4.35 in 16 calls, 0.5 and 5.37 in 32; with a bias 0.5 and 6.81

A call costs 0.06 to 0.1 ms, of some 25 small kernels, besides the copies of its part.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlm.ops.cudnn_documents import Documents

CALL_BYTES = 1100 * 2**20  # of a call's workspace, where that of all rows with one document each is less


class Group(NamedTuple):
    """What one call makes gradients of; less than all kv heads only of one row, and less than all query heads of a kv
    head only of one kv head."""

    rows: int
    kv_heads: int
    each: int  # query heads of each kv head


@dataclasses.dataclass(frozen=True)
class Rows:
    """B rows of T tokens, N heads and K kv heads on one device, in 16 bits."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, q: jax.Array, k: jax.Array, v: jax.Array) -> "Rows":
        """q [B, T, N, H], k [B, T, K, H], v [B, T, K, Hv]."""
        return cls(*q.shape[:3], k.shape[2], q.shape[3], v.shape[3])

    def workspace(self, most: int = 1, group: Group | None = None) -> int:
        """Bytes of one call, of all rows and heads or of a group, with room for `most` documents a row. Source:
        NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h (dQ_accum, softmax_sum, dK_fullhead, dV_fullhead);
        to the byte as compiled on an H200."""
        rows, kv_heads, each = group or self.whole
        by_head = 2 * (self.key_dim + self.value_dim) if each > 1 else 0
        return rows * most * self.tokens * kv_heads * each * (4 * (self.key_dim + 1) + by_head)

    @property
    def whole(self) -> Group:
        return Group(self.rows, self.kv_heads, self.heads // self.kv_heads)

    def group(self, most: int) -> Group:
        """The largest that takes no more with up to `most` documents a row than one call may."""
        rows, kv_heads, each = self.whole
        sizes = [Group(n, kv_heads, each) for n in _parts(rows)] + [Group(1, n, each) for n in _parts(kv_heads)]
        sizes += [Group(1, 1, n) for n in _parts(each)]
        return next((size for size in sizes if self.workspace(most, size) <= self._allowed), sizes[-1])

    def bounded(self, levels: Sequence[int]) -> tuple[int, ...]:
        """Of these numbers of documents a row, each as far as the smallest call takes no more than it may."""
        fit = self._allowed // self.workspace(1, Group(1, 1, 1))
        return tuple(dict.fromkeys(min(most, fit) for most in levels if fit > 1))

    @property
    def _allowed(self) -> int:
        return max(CALL_BYTES, self.workspace())


def _parts(count: int) -> list[int]:
    """The numbers that divide it, from the largest on."""
    return [n for n in range(count, 0, -1) if count % n == 0]


def by_groups(run: Callable[..., tuple], most: int, ids: jax.Array, where: Documents, q, k, v, out, lse, d_out):
    """run(q, k, v, bias, out, lse, d_out, where=) -> (d_q, d_k, d_v), as cudnn_attention.backward, of up to `most`
    documents in each row of ids int32 [B, T], which lie `where`: of one group after the other."""
    sizes = Rows.of(q, k, v)
    group, whole = sizes.group(most), sizes.whole
    if group == whole:
        return run(q, k, v, None, out, lse, d_out, where=where)
    B, T, (K, each) = sizes.rows, sizes.tokens, whole[1:]
    places = jax.vmap(lambda some: Documents.of(some, most))(ids.reshape(B // group.rows, group.rows, T))
    by_kv = [a.reshape(B, T, K, each, a.shape[-1]) for a in (q, out, d_out)]
    lse = lse.reshape(B, K, each, T)
    added = group.each < each  # a kv head's gradients are summed over calls

    calls = tuple(all_ // part for all_, part in zip(whole, group, strict=True))

    def one(sums, call: jax.Array):
        row, head, query = (n * part for n, part in zip(jnp.unravel_index(call, calls), group, strict=True))

        def of_queries(a: jax.Array) -> jax.Array:
            sizes = group.rows, T, group.kv_heads, group.each, a.shape[-1]
            return jax.lax.dynamic_slice(a, (row, 0, head, query, 0), sizes).reshape(*sizes[:2], -1, sizes[-1])

        def of_keys(a: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice(a, (row, 0, head, 0), (group.rows, T, group.kv_heads, a.shape[-1]))

        def put(whole: jax.Array, part: jax.Array) -> jax.Array:
            part = (of_keys(whole) + part if added else part).astype(whole.dtype)
            return jax.lax.dynamic_update_slice(whole, part, (row, 0, head, 0))

        of_rows = jax.lax.dynamic_slice(lse, (row, head, query, 0), (*group, T)).reshape(group.rows, -1, T)
        lie = jax.tree.map(lambda a: a[row // group.rows], places)
        some, some_out, some_d_out = map(of_queries, by_kv)
        d_q, d_k, d_v = run(some, of_keys(k), of_keys(v), None, some_out, of_rows, some_d_out, where=lie)
        d_q = d_q.reshape(group.rows, T, group.kv_heads, group.each, -1)
        d_q = jax.lax.dynamic_update_slice(sums[0], d_q, (row, 0, head, query, 0))
        return (d_q, put(sums[1], d_k), put(sums[2], d_v)), None

    begun = jnp.zeros_like(by_kv[0]), *(jnp.zeros_like(a, jnp.float32 if added else a.dtype) for a in (k, v))
    (d_q, d_k, d_v), _ = jax.lax.scan(one, begun, jnp.arange(math.prod(calls), dtype=jnp.int32))
    return d_q.reshape(q.shape), d_k.astype(k.dtype), d_v.astype(v.dtype)
