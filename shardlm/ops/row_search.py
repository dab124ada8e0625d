"""Sums and thresholds over a vocabulary whose result for a row does not depend on the other rows, bit for bit: the
order of every floating-point addition is written down, where XLA's own reductions choose theirs by shape."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_FOLD = 32  # additions fused into one pass over the vocabulary; 262,144 tokens take four passes of shrinking length


def ordered_sum(x: jax.Array) -> jax.Array:
    """float32 [..., V] -> [...]: a balanced tree of additions, the same whatever the other dimensions are."""
    while x.shape[-1] > 1:
        x = jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -x.shape[-1] % _FOLD)))
        x = x.reshape(*x.shape[:-1], _FOLD, -1)
        while x.shape[-2] > 1:
            x = x[..., ::2, :] + x[..., 1::2, :]
        x = x[..., 0, :]
    return x[..., 0]


def sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 with a < b just where the numbers have it; the two zeros are one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def largest_threshold(keys: jax.Array, measure: Callable[[jax.Array], jax.Array], target: jax.Array) -> jax.Array:
    """The largest t, uint32 [B], for which `measure(keys >= t)` [B] reaches `target` [B]; 0 where none does.

    `measure` must not shrink when its mask grows. The 32 bits of t are found one after another, each in one pass over
    keys uint32 [B, V]. No sort: 8 rows of 131,072 tokens take 9 ms on two CPU cores, where sorting the keys takes 40
    and sorting the floats 210.
    """

    def next_bit(i, found):
        trial = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(measure(keys >= trial[:, None]) >= target, trial, found)

    return jax.lax.fori_loop(0, 32, next_bit, jnp.zeros_like(target, jnp.uint32))


def kth_largest(keys: jax.Array, k: int, bits: int = 4) -> jax.Array:
    """The k-th largest of each row, of equal ones as many as there are; 0 where a row has fewer. uint32 [..., S] ->
    uint32 [...].

    So many bits are found in a pass over the keys, by as many counts as they have values: on a GPU few passes are few
    kernels (8 of rows that its cache holds, 32 by `largest_threshold`), and no sort.
    """
    steps = jnp.arange(1, 1 << bits, dtype=jnp.uint32)
    found = jnp.zeros(keys.shape[:-1], jnp.uint32)
    for shift in range(32 - bits, -1, -bits):
        trials = found[..., None] | steps << shift  # [..., values]
        reached = jnp.sum(keys[..., None, :] >= trials[..., None], axis=-1, dtype=jnp.int32) >= k
        found = found | jnp.sum(reached, axis=-1, dtype=jnp.uint32) << shift
    return found
