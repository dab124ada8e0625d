"""Which blocks of tokens a query attends to where an indexer chooses them (Qwen4-Exp's QSA; transformers'
modeling_qwen4_exp.py is the definition): every `block` tokens of a text have one key, the mean of theirs, normed and
rotated as the first of them. Of the blocks that end before a query or with it, those with the highest scores are
attended to, and the tokens behind the last of them always. ops/token_choice.py has the choice of tokens."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.ops import paged_attention
from shardlm.ops.compression import Ends
from shardlm.ops.kv_format import SCALE, order_of
from shardlm.ops.norm import rms_norm
from shardlm.ops.paged_attention import PagedAttention, numbers_of
from shardlm.ops.rope import Rope, rope
from shardlm.ops.token_choice import SCORES_BYTES, block_of, highest, scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockIndex:
    """What an indexer makes of tokens: queries q [B, T, N, H] and keys k [B, T, H] before their mean; `scale` [H] and
    eps of a block's norm, and its rotation; how many blocks of how many tokens are chosen."""

    q: jax.Array
    k: jax.Array
    scale: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})
    rope: Rope = dataclasses.field(metadata={"static": True})
    blocks: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> int:
        """Tokens that a text may have and every query still attends to all before it."""
        return (self.blocks + 1) * self.block - 1


def block_keys(index: BlockIndex, k: jax.Array, first: jax.Array) -> jax.Array:
    """Of the tokens' keys k [B, J, block, H], whose first stand at `first` int32 [B, J]: [B, J, H]."""
    mean = jnp.mean(k.astype(jnp.float32), axis=2).astype(k.dtype)
    return rope(rms_norm(mean, index.scale, index.eps)[:, :, None], first, index.rope)[:, :, 0]


def chosen_in_rows(index: BlockIndex, positions: jax.Array, segment_ids: jax.Array, over: str = "") -> jax.Array:
    """Which tokens of its row each query attends to, of its segment up to itself. The arrays of one device, positions
    and segment_ids int32 [B, T]; returns bool [B, T, T].

    `over`: the mesh axis that rows are split over, in natural order; the result is then of whole rows.
    """
    first, k, of_keys, at = 0, index.k, segment_ids, positions
    if over:
        first = jax.lax.axis_index(over) * segment_ids.shape[1]
        k, of_keys, at = (jax.lax.all_gather(a, over, axis=1, tiled=True) for a in (k, segment_ids, positions))
    (B, T), S, rate = segment_ids.shape, of_keys.shape[1], index.block
    ends = Ends.of(at, of_keys, rate)
    J = ends.last.shape[1]
    inside = jnp.maximum(ends.last[:, :, None] - rate + 1 + jnp.arange(rate), 0).reshape(B, -1, 1)
    keys = block_keys(index, jnp.take_along_axis(k, inside, axis=1).reshape(B, J, rate, -1), ends.first)
    last = jnp.arange(S) + rate - 1 - at % rate  # of the block that a token is of: its index in the row
    of_block = jnp.minimum(last // rate, J - 1)
    there = jnp.take_along_axis(ends.last, of_block, axis=1) == last
    there &= jnp.take_along_axis(ends.segment, of_block, axis=1) == of_keys
    size = block_of(T, SCORES_BYTES // (4 * B * index.q.shape[2] * J))

    def block(start):
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1)  # noqa: E731
        q, own, place = part(index.q), part(segment_ids)[:, :, None], (first + start + jnp.arange(size))[:, None]
        complete = (own == ends.segment[:, None]) & (ends.last[:, None] <= place)
        found = highest(scores(q, jnp.ones(q.shape[:3], jnp.float32), keys), complete, index.blocks)
        found = jnp.take_along_axis(found, jnp.broadcast_to(of_block[:, None], (B, size, S)), axis=2) & there[:, None]
        behind = at[:, None] >= ((part(positions) + 1) // rate * rate)[:, :, None]
        return (found | behind) & (own == of_keys[:, None]) & (jnp.arange(S) <= place)

    found = jax.lax.map(block, jnp.arange(0, T, size))  # [blocks, B, size, S]
    found = jnp.moveaxis(found, 0, 1).reshape(B, T, S)
    return jax.lax.all_gather(found, over, axis=1, tiled=True) if over else found


def choose(
    index: BlockIndex,
    pools: dict[str, jax.Array],
    name: str,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
    implementation: PagedAttention,
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """(which positions of its row's pages each query attends to, bool [B, T, S], None where that is all before it; the
    pools with the tokens' keys written). The arrays of one device; `name` is that of the keys' pool among `pools`,
    page_table int32 [B, W], positions int32 and valid bool [B, T]."""
    where = (page_table, positions, valid, first_page)
    pools = paged_attention.write(pools, {name: index.k[:, :, None]}, *where, implementation=implementation)
    pool, scale, rate = pools[name], pools.get(name + SCALE), index.block
    page_size = pool.shape[order_of(name, pool.dtype, implementation).index("s")]
    (B, T), S = positions.shape, page_table.shape[1] * page_size
    if index.count >= S:
        return None, pools
    table = page_table + first_page
    k = numbers_of(pool[table], None if scale is None else scale[table], index.k.dtype)
    J = S // rate
    k = k.reshape(B, S, -1)[:, : J * rate].reshape(B, J, rate, -1)
    keys = block_keys(index, k, jnp.broadcast_to(jnp.arange(J) * rate, (B, J)))
    of_position = jnp.minimum(jnp.arange(S) // rate, J - 1)
    size = block_of(T, SCORES_BYTES // (4 * B * index.q.shape[2] * J))

    def block(start):
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1)  # noqa: E731
        q, complete = part(index.q), ((part(positions) + 1) // rate)[:, :, None]
        found = scores(q, jnp.ones(q.shape[:3], jnp.float32), keys)
        found = highest(found, jnp.arange(J) < complete, index.blocks)[:, :, of_position]
        return found & (jnp.arange(S) < J * rate) | (jnp.arange(S) >= complete * rate)

    if size == T:
        return block(jnp.int32(0)), pools
    found = jax.lax.map(block, jnp.arange(0, T, size))
    return jnp.moveaxis(found, 0, 1).reshape(B, T, S), pools
