"""Which blocks of tokens the queries of each kv head attend to, where an indexer chooses for each by itself (MiniMax
M3; transformers' modeling_minimax_m3_vl.py is the definition): the score of a block is its highest token's, a query's
own block and the last few before it are always attended to, and the others that are chosen end before those.
ops/block_choice.py has the choice of one head, and that of all heads together."""

import dataclasses

import jax
import jax.numpy as jnp

from shardlm.ops import block_choice, paged_attention
from shardlm.ops.paged_attention import PagedAttention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnIndex:
    """What an indexer makes of tokens for one kv head: queries q [B, T, 1, H] and keys k [B, T, H]; how many blocks of
    how many tokens are chosen, and how many of the last ones are attended to besides."""

    q: jax.Array
    k: jax.Array
    blocks: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    last: int = dataclasses.field(metadata={"static": True})

    weighing = turns = None
    of_latents = False

    @property
    def count(self) -> int:
        """Tokens that a text may have and every query still attends to all before it."""
        return (self.blocks + self.last) * self.block

    @property
    def each_block(self) -> int:
        """Numbers of which a block's score is made."""
        return self.block

    @property
    def room(self) -> int:
        """Blocks that are attended to at most."""
        return self.blocks + self.last

    def whole(self, positions: jax.Array) -> jax.Array:
        """Of how many blocks, from a text's first on, queries at these positions choose some; all behind them are
        attended to."""
        return jnp.maximum(positions // self.block - self.last + 1, 0)

    def of_blocks(self, k: jax.Array, first: jax.Array) -> jax.Array:
        """k [B, J, block, H] of tokens, all of which are scored."""
        del first
        return k

    def scored(self, q: jax.Array, weights: None, keys: jax.Array) -> jax.Array:
        """q [B, T, 1, H] of some queries, keys [B, J, block, H] -> float32 [B, T, J]."""
        del weights
        each = jnp.einsum("bth,bjrh->btjr", q[:, :, 0], keys, preferred_element_type=jnp.float32)
        return jnp.max(each, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadIndex:
    """The same for all kv heads, q [B, T, K, H]."""

    q: jax.Array
    k: jax.Array
    blocks: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    last: int = dataclasses.field(metadata={"static": True})

    @property
    def count(self) -> int:
        """Tokens that a text may have and every query still attends to all before it."""
        return (self.blocks + self.last) * self.block

    def each(self) -> list[OwnIndex]:
        """Of each head."""
        numbers = self.blocks, self.block, self.last
        return [OwnIndex(self.q[:, :, head : head + 1], self.k, *numbers) for head in range(self.q.shape[2])]


def chosen_in_rows(index: HeadIndex, positions: jax.Array, segment_ids: jax.Array, over: str = "") -> jax.Array:
    """As block_choice.chosen_in_rows, for each head: bool [B, K, T, T]."""
    each = [block_choice.chosen_in_rows(own, positions, segment_ids, over) for own in index.each()]
    return jnp.stack(each, axis=1)


def choose(
    index: HeadIndex,
    pools: dict[str, jax.Array],
    name: str,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
    implementation: PagedAttention,
):
    """As block_choice.choose, with a dimension of heads behind that of rows in what is chosen."""
    where = (page_table, positions, valid, first_page)
    pools = paged_attention.write(pools, {name: index.k[:, :, None]}, *where, implementation=implementation)
    of_pages = pools, name, page_table, positions, first_page, implementation
    each = [block_choice.among(own, *of_pages) for own in index.each()]
    return None if each[0] is None else jax.tree.map(lambda *a: jnp.stack(a, axis=1), *each), pools


def of_head(selection, head: int | jax.Array):
    """What the queries of one kv head attend to, of a choice for each."""
    return jax.tree.map(lambda a: jnp.take(a, head, axis=1), selection)


def is_for_each(selection) -> bool:
    """Whether it is of each kv head, and not of all together."""
    if isinstance(selection, block_choice.Places):
        return selection.first.ndim == 4
    return isinstance(selection, jax.Array) and selection.ndim == 4
