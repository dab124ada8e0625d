"""Products of one token a row with its pages where they lie, for a CPU of few cores: of one row after another. What
gathers pages (paged_attention.py) writes them once more, by other cores than those that read them next.

XLA:CPU fuses a sum of slices at places that are known as it runs; a batch of such places (gather) it never fuses. So
`TERMS` numbers at a time are added up by one operation, of one core; sums of those follow for all rows at once.
Attention of 12 layers of 12 heads, 4 of keys, pages of 64 in float32, gathered | in place, ms a step on two cores of an
Intel Xeon (measured, in turns):

- 8 rows at position 60 and 190:    4.1 | 1.4, 7.4 | 3.9
- 32 rows at position 60 and 190:   17.8 | 9.4, 36.5 | 28.2, of which waiting for memory takes 19
- 4 layers of 4 heads of keys of 128 with 2, 4, 8 and 16 queries each, 8 rows at 190: 7.1 | 2.8, 6.3 | 3.3, 10.8 | 7.0,
  13.9 | 13.5 (beside other work); a row alone 0.6 | 0.4, 0.6 | 0.5, 0.8 | 0.9, 1.4 | 1.3
- whole steps of 768 x 12 layers, at positions 128 to 192, 1, 8 and 32 rows: 62 | 65, 220 | 233, 384 | 420 tokens/s

Not taken: 64 terms (as quick, twice the time to compile), 8 and 4 (a fifth and a third slower at 32 rows); two, four or
eight rows by one operation, of which each core does a part (both cores wait for each other, or XLA:CPU computes one
number at a time: as slow as gathered, or twice that); halves of the rows in loops of their own (not run beside each
other)."""

import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardlm.ops.kv_format import numbers_each, numbers_of

TERMS = 16
# Measured with two. Four gather by two as well (XLA:CPU takes the root of their number), which is most of the time.
CORES = 4
PAGE = 64  # positions of one, at least: each operation of a row takes a microsecond beside its work
QUERIES = 8  # of a kv head, that are multiplied one after the other; more are left to products of matrices


def suits(q: jax.Array, k_pool: jax.Array, v_pool: jax.Array) -> bool:
    """Whether q [B, T, N, H] are multiplied with pages of these pools here: `k_pool` [pages, K, H, page_size], `v_pool`
    [pages, K, page_size, H], in the dtype that is computed in or bfloat16's bits."""
    heads, page_size = k_pool.shape[1], v_pool.shape[2]
    one_each = q.shape[1] == 1 and q.shape[2] <= QUERIES * heads
    in_terms = all(numbers_each(a) == 1 and size % TERMS == 0 for a in (k_pool, v_pool) for size in a.shape[2:])
    return one_each and in_terms and page_size >= PAGE and cores() <= CORES


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows in the order of their lengths, of which a page is read by those alone that are as long: scores of others are
    0, and their weights count as 0.

    k, v       the pools of `suits`
    table      int32 [B, pages]
    last       int32 [B]: the page of each row's last position
    order      int32 [B]: rows, the longest first
    dtype      that numbers are rounded to
    """

    k: jax.Array
    v: jax.Array
    table: jax.Array
    last: jax.Array
    order: jax.Array
    dtype: jnp.dtype

    @staticmethod
    def of(k: jax.Array, v: jax.Array, table: jax.Array, last: jax.Array, dtype: jnp.dtype) -> "Rows":
        """Put in order once, before a loop over pages."""
        return Rows(k, v, table, last, jnp.argsort(-last), dtype)

    @property
    def per_block(self) -> int:
        """A block is one page."""
        return 1

    @property
    def apart(self) -> bool:
        """Scores have no dimension of pages."""
        return False

    def products(self, at: jax.Array, q: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """Scores of q [B, K, G, 1, H] with keys of each row's page number `at`, float32 [B, K, G, 1, page_size]; and
        what makes of weights like them the values, float32 [B, K, G, 1, H]."""
        B, K, G, _, H = q.shape
        page_size, width = self.v.shape[2:]

        def summed(weights: jax.Array) -> jax.Array:
            held = jnp.zeros((B, K, page_size // TERMS, G, width), jnp.float32)
            return self._each(at, self.v, weights[:, :, :, 0], held)[:, :, :, None]

        held = jnp.zeros((B, K, H // TERMS, G, page_size), jnp.float32)
        return self._each(at, self.k, q[:, :, :, 0], held)[:, :, :, None], summed

    def _each(self, at: jax.Array, pool: jax.Array, by: jax.Array, held: jax.Array) -> jax.Array:
        def row(i, held):
            row = self.order[i]
            found = _summed(pool, self.table[row, at], by[row], self.dtype)
            return jax.lax.dynamic_update_slice(held, found[None], (row, 0, 0, 0, 0))

        held = jax.lax.fori_loop(0, jnp.sum(self.last >= at), row, held)
        return functools.reduce(
            jnp.add, [held[:, :, part] for part in range(held.shape[2])]
        )  # a reduction takes longer


def _summed(pool: jax.Array, page: jax.Array, by: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """by [K, G, X] with one page of pool [pages, K, X, Y], as sums of `TERMS` each, float32 [K, X / TERMS, G, Y]."""
    pages, K, X, Y = pool.shape
    terms = pool.reshape(pages, K, X // TERMS, TERMS, Y)
    by = jnp.einsum("kgct->tkcg", by.reshape(K, -1, X // TERMS, TERMS))
    found = 0
    for term in range(TERMS):
        held = jax.lax.dynamic_slice(terms, (page, 0, 0, term, 0), (1, K, X // TERMS, 1, Y))[0]  # [K, C, 1, Y]
        found = found + numbers_of(held, None, dtype).astype(jnp.float32) * by[term][..., None]
    return found
