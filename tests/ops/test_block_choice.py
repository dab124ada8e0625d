"""Blocks of tokens that an indexer chooses: in packed rows and over pages as a plain loop has it, and attention to them
where they lie as to a mask of theirs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.layers.context import INDEX
from shardlm.ops import block_choice, paged_attention
from shardlm.ops.attention import attend
from shardlm.ops.block_choice import BlockIndex, Places
from shardlm.ops.kv_format import AXES, order_of, pool_shape
from shardlm.ops.rope import Rope

HEADS, WIDTH, ROPE = 7, 8, Rope(100.0, dim=4)
OF_BLOCKS = jax.jit(BlockIndex.of_blocks)


def index_of(tokens: int, rows: int, block: int, blocks: int, on_axes: bool) -> BlockIndex:
    """`on_axes`: a pair of each head turns by a token's row in an image, the other by its column."""
    rng = np.random.default_rng(tokens)
    q, k = (jnp.asarray(rng.standard_normal((rows, tokens, *a)), jnp.float32) for a in ((HEADS, WIDTH), (WIDTH,)))
    scale = jnp.asarray(1 + 0.1 * rng.standard_normal(WIDTH), jnp.float32)
    turned = dataclasses.replace(ROPE, axes=(1, 2) if on_axes else ())
    turns = jnp.asarray(rng.integers(0, 40, (rows, tokens, 3)), jnp.int32) if on_axes else None
    return BlockIndex(q, k, scale, 1e-6, turned, blocks, block, turns)


def by_a_loop(index: BlockIndex, row: int, first: int, stop: int) -> np.ndarray:
    """bool [n, n] of the text in a row from `first` to `stop`, as the definition has it."""
    length, rate = stop - first, index.block
    index = jax.tree.map(np.asarray, index)
    found = np.zeros((length, length), bool)
    whole = length // rate
    k = index.k[row : row + 1, first : first + whole * rate].reshape(1, whole, rate, WIDTH)
    begins = np.arange(whole)[None] * rate
    begins = begins if index.turns is None else index.turns[row : row + 1, first + begins[0]]
    keys = np.asarray(OF_BLOCKS(index, k, begins))[0]
    for t in range(length):
        complete = (t + 1) // rate
        score = np.maximum(index.q[row, first + t] @ keys[:complete].T, 0).sum(0)
        for block in np.argsort(-score, kind="stable")[: index.blocks]:
            found[t, block * rate : (block + 1) * rate] = True
        found[t, complete * rate : t + 1] = True
    return found


@pytest.mark.parametrize("on_axes", [False, True])
def test_blocks_of_packed_rows(on_axes):
    """Texts that begin anywhere, one that ends within a block, and padding behind."""
    texts = [[(0, 10), (10, 29)], [(0, 25)]]
    index = index_of(32, 2, 3, 2, on_axes)
    segment_ids, positions = np.zeros((2, 2, 32), np.int32)
    expected = np.zeros((2, 32, 32), bool)
    for row, own in enumerate(texts):
        for number, (first, stop) in enumerate(own):
            segment_ids[row, first:stop], positions[row, first:stop] = number + 1, np.arange(stop - first)
            expected[row, first:stop, first:stop] = by_a_loop(index, row, first, stop)
    found = np.asarray(jax.jit(block_choice.chosen_in_rows)(index, positions, segment_ids))
    real = segment_ids > 0
    np.testing.assert_array_equal(found[real], expected[real])


@pytest.mark.wide
@pytest.mark.parametrize("on_axes", [False, True])
def test_blocks_over_pages(on_axes):
    """Which go into pages without rest by twos alone. In two chunks: as a mask where pages are gathered, and as places
    that the kernel, interpreted, reads."""
    B, T, N, K, H, cut, page_size, block = 2, 44, 4, 2, 16, 19, 4, 6
    index, rng = index_of(T, B, block, 3, on_axes), np.random.default_rng(0)
    width = -(-T // page_size)
    table = jnp.asarray(1 + rng.permutation(B * width).reshape(B, width), jnp.int32)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, n, H)), jnp.float32) for n in (N, K, K))
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    expected = np.stack([by_a_loop(index, row, 0, T) for row in range(B)])

    def empty(implementation, heads, size):
        order = order_of(INDEX, jnp.float32, implementation)
        return jnp.zeros(pool_shape(order, 1 + B * width, page_size, heads, size))

    def chunk(part, pools, implementation):
        cut = jax.tree.map(lambda a: np.asarray(a)[:, part], (index.q, index.k, index.turns, q, k, v, positions))
        return read(implementation, *cut, pools)

    @functools.partial(jax.jit, static_argnums=0)
    def read(implementation, of_q, of_k, turns, q, k, v, positions, pools):
        own = dataclasses.replace(index, q=of_q, k=of_k, turns=turns)
        where = (table, positions, jnp.ones(positions.shape, bool), jnp.int32(0))
        held = {name: a for name, a in pools.items() if name in (INDEX, INDEX + AXES)}
        pools = {name: a for name, a in pools.items() if name not in held}
        chosen, held = block_choice.choose(own, held, INDEX, *where, implementation)
        new = {"k": k, "v": v} if pools else {}
        pools = paged_attention.write(pools, new, *where, implementation=implementation)
        if isinstance(chosen, Places):
            chosen = block_choice.attend(q, pools, chosen, jnp.int32(0), H**-0.5, interpret=True)
        return chosen, pools | held

    def keys(implementation):
        places = {INDEX + AXES: empty(implementation, 1, 3).astype(jnp.int32)} if on_axes else {}
        return {INDEX: empty(implementation, 1, WIDTH)} | places

    masks = keys("blocked")
    pools = keys("pallas") | {"k": empty("pallas", K, H), "v": empty("pallas", K, H)}
    attended = attend(q, k, v, jnp.asarray(expected), H**-0.5)
    for part in (slice(0, cut), slice(cut, T)):
        mask, masks = chunk(part, masks, "blocked")
        seen = np.asarray(mask)[:, :, :T] & (np.arange(T) <= np.arange(T)[part, None])
        np.testing.assert_array_equal(seen, expected[:, part])
        out, pools = chunk(part, pools, "pallas")
        np.testing.assert_allclose(out, attended[:, part], atol=1e-5)
