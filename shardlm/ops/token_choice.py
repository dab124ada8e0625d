"""Which tokens a query attends to where an indexer chooses them: DeepSeek Sparse Attention
(https://arxiv.org/abs/2512.02556, section 2.1). Cheap heads of their own score all tokens before a query, and the
`count` highest are attended to. Scores over pages are paged_choice.py's."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.ops.row_search import kth_largest, sortable

SCORES_BYTES = 2**26  # of all heads' scores of a block of queries, before they are summed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Index:
    """What an indexer makes of tokens: queries q [B, T, N, H] and their heads' weights float32 [B, T, N], which hold
    the scale of the scores; keys k [B, T, H]; and how many tokens a query attends to."""

    q: jax.Array
    weights: jax.Array
    k: jax.Array
    count: int = dataclasses.field(metadata={"static": True})


def scores(q: jax.Array, weights: jax.Array, k: jax.Array) -> jax.Array:
    """Equation 1 there: of each head the product of query and key, what is above 0 of it, summed by the heads' weights.
    q [B, T, N, H], weights float32 [B, T, N], k [B, S, H]; returns float32 [B, T, S]."""
    each = jnp.einsum("btnh,bsh->btns", q, k, preferred_element_type=jnp.float32)
    return jnp.einsum("btns,btn->bts", jax.nn.relu(each), weights, precision=jax.lax.Precision.HIGHEST)


def highest(scores: jax.Array, allowed: jax.Array, count: int) -> jax.Array:
    """Of the tokens that a query may attend to, the `count` with the highest scores, all where there are no more; of
    equal ones the first. float32 and bool [B, T, S] -> bool [B, T, S]."""
    keys = jnp.where(allowed, sortable(scores), 0)  # 0 is below every number's
    threshold = kth_largest(keys, count)[..., None]
    above, equal = keys > threshold, keys == threshold
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return allowed & (above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)))


def chosen_in_rows(index: Index, segment_ids: jax.Array, over: str = "") -> jax.Array:
    """Which tokens of its row each query attends to: those of its segment up to itself that the indexer chooses. The
    arrays of one device, segment_ids int32 [B, T]; returns bool [B, T, T].

    `over`: the mesh axis that rows are split over, in natural order; the result is then of whole rows.
    """
    first, k, of_keys = 0, index.k, segment_ids
    if over:
        first = jax.lax.axis_index(over) * segment_ids.shape[1]
        k, of_keys = (jax.lax.all_gather(a, over, axis=1, tiled=True) for a in (k, segment_ids))
    T, S = segment_ids.shape[1], k.shape[1]
    B, _, N, _ = index.q.shape
    size = block_of(T, SCORES_BYTES // (4 * B * N * S))

    def block(start):
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1)  # noqa: E731
        place = first + start + jnp.arange(size)
        allowed = (part(segment_ids)[:, :, None] == of_keys[:, None]) & (place[:, None] >= jnp.arange(S))
        return highest(scores(part(index.q), part(index.weights), k), allowed, index.count)

    found = jax.lax.map(block, jnp.arange(0, T, size))  # [blocks, B, size, S]
    found = jnp.moveaxis(found, 0, 1).reshape(B, T, S)
    return jax.lax.all_gather(found, over, axis=1, tiled=True) if over else found


def block_of(T: int, most: int) -> int:
    """The largest divisor of T up to `most`, at least 1."""
    return next(size for size in range(min(T, max(1, most)), 0, -1) if T % size == 0)
