"""Which blocks of tokens a query attends to where an indexer chooses them (Qwen4-Exp's QSA; transformers'
modeling_qwen4_exp.py is the definition): every `block` tokens of a text have one key, the mean of theirs, normed and
rotated as the first of them, or their sum by learned weights (GLM-5 Next). Of the blocks that end before a query or
with it, those with the highest scores are attended to, and the tokens behind the last of them always.
ops/token_choice.py has the choice of tokens."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp

from shardlm.ops import paged_attention
from shardlm.ops.compression import Ends
from shardlm.ops.kv_format import AXES, SCALE, numbers_of, order_of
from shardlm.ops.norm import rms_norm
from shardlm.ops.paged_attention import PagedAttention
from shardlm.ops.rope import Rope, rope
from shardlm.ops.token_choice import SCORES_BYTES, block_of, highest, scores

AT_ONCE = 2**24  # positions of a block of queries
KEYS = 256  # tokens whose keys are gathered at a time, at least


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where in a layer's part of a pool what a query attends to lies: `first` int32 [B, T, n] of each `unit` tokens, as
    many as go into a page and into a block without rest, numbered from the pool's beginning by so many; of the chosen
    blocks, and behind them of the one that is not complete. `last` int32 [B, T]: how many tokens these are, less one.
    """

    first: jax.Array
    last: jax.Array
    unit: int = dataclasses.field(metadata={"static": True})


Selection = jax.Array | Places
"""`blocked`: bool [B, T, S], which positions of a row's pages; `pallas`: Places."""


class _Completed:
    """What indexes have in common of which a query chooses `blocks` complete ones of `block` tokens."""

    turns = None

    @property
    def count(self) -> int:
        """Tokens that a text may have and every query still attends to all before it."""
        return (self.blocks + 1) * self.block - 1

    def whole(self, positions: jax.Array) -> jax.Array:
        """Of how many blocks, from a text's first on, queries at these positions choose some."""
        return (positions + 1) // self.block

    @property
    def each_block(self) -> int:
        """Numbers of which a block's score is made."""
        return self.q.shape[2]

    @property
    def room(self) -> int:
        """Blocks that are attended to at most, the one that is not complete among them."""
        return self.blocks + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockIndex(_Completed):
    """What an indexer makes of tokens: queries q [B, T, N, H] and keys k [B, T, H] before their mean; `scale` [H] and
    eps of a block's norm, and its rotation; how many blocks of how many tokens are chosen. turns int32 [B, T, 3]: where
    the tokens are on three axes, None: on one, at their positions."""

    q: jax.Array
    k: jax.Array
    scale: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})
    rope: Rope = dataclasses.field(metadata={"static": True})
    blocks: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    turns: jax.Array | None = None

    def of_blocks(self, k: jax.Array, first: jax.Array) -> jax.Array:
        """Of the tokens' keys k [B, J, block, H], whose first stand at `first` int32 [B, J], or [B, J, 3] on axes:
        [B, J, H]."""
        mean = jnp.mean(k.astype(jnp.float32), axis=2).astype(k.dtype)
        return rope(rms_norm(mean, self.scale, self.eps)[:, :, None], first, self.rope)[:, :, 0]

    def scored(self, q: jax.Array, weights: jax.Array | None, keys: jax.Array) -> jax.Array:
        """q [B, T, N, H] of some queries and their part of `weighing`, keys [B, J, H] -> float32 [B, T, J]."""
        del weights
        return scores(q, jnp.ones(q.shape[:3], jnp.float32), keys)

    weighing = None  # heads weigh alike
    of_latents = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledIndex(_Completed):
    """The same of an indexer beside latent attention (GLM-5 Next): queries q [B, T, N, H], and of each token its key
    and what it weighs of each number, side by side, k [B, T, 2 * H]; `scale` [block, H] is added to that by the token's
    place in its block; what heads weigh, `weighing` float32 [B, T, N]."""

    q: jax.Array
    k: jax.Array
    scale: jax.Array
    blocks: int = dataclasses.field(metadata={"static": True})
    block: int = dataclasses.field(metadata={"static": True})
    weighing: jax.Array

    of_latents = True

    def of_blocks(self, k: jax.Array, first: jax.Array) -> jax.Array:
        """k [B, J, block, 2 * H] of tokens -> [B, J, H]; nothing is rotated."""
        del first
        k, gate = jnp.split(k, 2, axis=-1)
        shares = jax.nn.softmax(gate.astype(jnp.float32) + self.scale.astype(jnp.float32), axis=2)
        return jnp.sum(shares.astype(k.dtype) * k, axis=2)

    def scored(self, q: jax.Array, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """q [B, T, N, H] of some queries and their weights [B, T, N], keys [B, J, H] -> float32 [B, T, J]."""
        return scores(q.astype(jnp.float32), weights, keys.astype(jnp.float32))


def chosen_in_rows(
    index: BlockIndex | PooledIndex, positions: jax.Array, segment_ids: jax.Array, over: str = ""
) -> jax.Array:
    """Which tokens of its row each query attends to, of its segment up to itself. The arrays of one device, positions
    and segment_ids int32 [B, T]; returns bool [B, T, T].

    `over`: the mesh axis that rows are split over, in natural order; the result is then of whole rows.
    """
    first, k, of_keys, at, turns = 0, index.k, segment_ids, positions, index.turns
    if over:
        first = jax.lax.axis_index(over) * segment_ids.shape[1]
        gather = partial(jax.lax.all_gather, axis_name=over, axis=1, tiled=True)
        k, of_keys, at, turns = jax.tree.map(gather, (k, of_keys, at, turns))
    (B, T), S, rate = segment_ids.shape, of_keys.shape[1], index.block
    ends = Ends.of(at, of_keys, rate)
    J = ends.last.shape[1]
    inside = jnp.maximum(ends.last[:, :, None] - rate + 1 + jnp.arange(rate), 0).reshape(B, -1, 1)
    begins = ends.first if turns is None else jnp.take_along_axis(turns, inside[:, ::rate], axis=1)
    keys = index.of_blocks(jnp.take_along_axis(k, inside, axis=1).reshape(B, J, rate, -1), begins)
    last = jnp.arange(S) + rate - 1 - at % rate  # of the block that a token is of: its index in the row
    of_block = jnp.minimum(last // rate, J - 1)
    there = jnp.take_along_axis(ends.last, of_block, axis=1) == last
    there &= jnp.take_along_axis(ends.segment, of_block, axis=1) == of_keys
    size = block_of(T, SCORES_BYTES // (4 * B * index.each_block * J))

    def block(start):
        part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis=1)  # noqa: E731
        q, own, place = part(index.q), part(segment_ids)[:, :, None], (first + start + jnp.arange(size))[:, None]
        whole = index.whole(part(positions))[:, :, None] * rate
        complete = (own == ends.segment[:, None]) & (ends.last[:, None] <= place) & (ends.first[:, None] < whole)
        weights = None if index.weighing is None else part(index.weighing)
        found = highest(index.scored(q, weights, keys), complete, index.blocks)
        found = jnp.take_along_axis(found, jnp.broadcast_to(of_block[:, None], (B, size, S)), axis=2) & there[:, None]
        behind = at[:, None] >= whole
        return (found | behind) & (own == of_keys[:, None]) & (jnp.arange(S) <= place)

    found = jax.lax.map(block, jnp.arange(0, T, size))  # [blocks, B, size, S]
    found = jnp.moveaxis(found, 0, 1).reshape(B, T, S)
    return jax.lax.all_gather(found, over, axis=1, tiled=True) if over else found


def choose(
    index: BlockIndex | PooledIndex,
    pools: dict[str, jax.Array],
    name: str,
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
    implementation: PagedAttention,
) -> tuple[Selection | None, dict[str, jax.Array]]:
    """(what each query attends to, None where that is all before it; the pools with the tokens' keys written). The
    arrays of one device; `name` is that of the keys' pool among `pools`, page_table int32 [B, W], positions int32 and
    valid bool [B, T]."""
    where, new = (page_table, positions, valid, first_page), {name: index.k[:, :, None]}
    if (axes := name + AXES) in pools:
        turns = jnp.repeat(positions[..., None], 3, axis=-1) if index.turns is None else index.turns
        new[axes] = turns[:, :, None]
    pools = paged_attention.write(pools, new, *where, implementation=implementation)
    return among(index, pools, name, page_table, positions, first_page, implementation), pools


def among(
    index: BlockIndex | PooledIndex,
    pools: dict[str, jax.Array],
    name: str,
    page_table: jax.Array,
    positions: jax.Array,
    first_page: jax.Array,
    implementation: PagedAttention,
) -> Selection | None:
    """What queries choose of what is held up to `positions`; arguments as of `choose`."""
    held = pools[name], pools.get(name + SCALE), pools.get(name + AXES)
    page_size = held[0].shape[order_of(name, held[0].dtype, implementation).index("s")]
    (B, T), S, rate = positions.shape, page_table.shape[1] * page_size, index.block
    if index.count >= S:
        return None

    def some(q, positions, weights=None):
        complete = index.whole(positions)[:, :, None]
        found = _scored(index, q, weights, positions, *held, page_table + first_page, page_size)
        found = highest(found, jnp.arange(found.shape[2]) < complete, index.blocks)
        if implementation == "pallas":
            return _places(found, positions, page_table, page_size, index)
        behind = jnp.arange(S) >= complete * rate
        return jnp.repeat(found, rate, axis=2)[:, :, :S] | behind

    queries = (index.q, positions) if index.weighing is None else (index.q, positions, index.weighing)
    size = block_of(T, max(1, AT_ONCE // (B * S)))
    if size == T:
        return some(*queries)
    in_blocks = lambda a: jnp.moveaxis(a.reshape(B, T // size, size, *a.shape[2:]), 1, 0)  # noqa: E731
    found = jax.lax.map(lambda part: some(*part), tuple(map(in_blocks, queries)))
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1).reshape(B, T, *a.shape[3:]), found)


def _scored(
    index: BlockIndex | PooledIndex, q, weights, positions, pool, scale, axes, table, page_size: int
) -> jax.Array:
    """float32 [B, T, J] of all blocks that begin in pages, whole pages of keys at a time up to the last position of all
    rows; 0 beyond, and of blocks that are not complete something."""
    (B, T), rate, W = positions.shape, index.block, table.shape[1]
    least = math.lcm(page_size, rate)
    size = least * max(1, min(KEYS, W * page_size) // least)  # tokens
    table, each = jnp.pad(table, ((0, 0), (0, -W % (size // page_size)))), size // rate

    def block(i, found):
        pages = jax.lax.dynamic_slice_in_dim(table, i * (size // page_size), size // page_size, axis=1)
        k = numbers_of(pool[pages], None if scale is None else scale[pages], index.k.dtype)
        first = jnp.broadcast_to((i * each + jnp.arange(each)) * rate, (B, each))
        first = first if axes is None else axes[pages].reshape(B, each, rate, 3)[:, :, 0]
        part = index.scored(q, weights, index.of_blocks(k.reshape(B, each, rate, -1), first))
        return jax.lax.dynamic_update_slice_in_dim(found, part, i * each, axis=2)

    found = jnp.zeros((B, T, table.shape[1] * page_size // rate), jnp.float32)
    return jax.lax.fori_loop(0, jnp.max(positions) // size + 1, block, found)[..., : -(-W * page_size // rate)]


def _places(found: jax.Array, positions, page_table, page_size: int, index: BlockIndex | PooledIndex):
    """Of chosen blocks bool [B, T, J]: Places, and beside latents what ops/paged_choice.py has, of each token."""
    rate, unit = index.block, 1 if index.of_latents else math.gcd(page_size, index.block)
    (B, T), J, count = positions.shape, found.shape[2], jnp.sum(found, axis=2, dtype=jnp.int32)
    order = jax.lax.top_k(jnp.where(found, J - jnp.arange(J), 0), min(index.blocks, J))[0]  # the first blocks first
    blocks = jnp.pad(J - order, ((0, 0), (0, 0), (0, index.room - order.shape[2])))
    last, column = index.whole(positions)[..., None], jnp.arange(blocks.shape[2])
    behind = last + column - count[..., None]  # which are attended to besides, one after the other
    blocks = jnp.where(column < count[..., None], blocks, jnp.minimum(behind, positions[..., None] // rate))
    at = (blocks[..., None] * rate + jnp.arange(0, rate, unit)).reshape(B, T, -1)
    page = jnp.take_along_axis(page_table[:, None], jnp.minimum(at // page_size, page_table.shape[1] - 1), axis=2)
    first = page * (page_size // unit) + at % page_size // unit
    last = count * rate + positions - index.whole(positions) * rate
    return {"slots": first, "number": last + 1} if index.of_latents else Places(first, last, unit)


def attend(
    q: jax.Array,
    pools: dict[str, jax.Array],
    places: Places,
    first_page: jax.Array,
    scale: float,
    head: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """q [B, T, N, H] over the chosen blocks, each read where it lies in pools "k" and "v" [pages, page_size, K, H],
    whose pages are taken for several of fewer tokens; returns the shape of q. On GPUs. `head` as in `blocked` of
    paged_attention.py."""
    from shardlm.ops.paged_kernel import FEW_TOKENS, pallas  # Pallas takes a while to import

    (B, T), unit, page_size = q.shape[:2], places.unit, pools["k"].shape[1]
    pools = {name: a.reshape(-1, unit, *a.shape[2:]) for name, a in pools.items()}
    out = pallas(
        q.reshape(B * T, 1, *q.shape[2:]),
        pools["k"],
        pools["v"],
        places.first.reshape(B * T, -1),
        jnp.maximum(places.last, 0).reshape(B * T, 1),  # of padding, which has no tokens
        first_page * (page_size // unit),
        scale,
        k_scale=pools.get("k" + SCALE),
        v_scale=pools.get("v" + SCALE),
        head=head,
        alone=T <= FEW_TOKENS,
        interpret=interpret,
    )
    return out.reshape(q.shape)
