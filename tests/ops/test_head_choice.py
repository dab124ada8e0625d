"""Blocks of tokens that each kv head attends to, and pools of tokens that have a key by learned weights: in packed rows
and over pages as a plain loop has it, and attention to them where they lie as to a mask of theirs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.layers.context import INDEX
from shardlm.ops import block_choice, head_choice, paged_attention, paged_choice
from shardlm.ops.attention import attend
from shardlm.ops.block_choice import PooledIndex
from shardlm.ops.head_choice import HeadIndex
from shardlm.ops.head_rows import by_heads, from_heads
from shardlm.ops.kv_format import order_of, pool_shape

WIDTH, HEADS, CUT, PAGE = 8, 2, 19, 4


def of_heads(tokens: int, rows: int) -> HeadIndex:
    """Six of whose blocks are attended to, the last two always."""
    rng = np.random.default_rng(tokens)
    q, k = (jnp.asarray(rng.standard_normal((rows, tokens, *a)), jnp.float32) for a in ((HEADS, WIDTH), (WIDTH,)))
    return HeadIndex(q, k, blocks=2, block=3, last=2)


def pooled(tokens: int, rows: int) -> PooledIndex:
    """Of which three are chosen, of six tokens each."""
    rng = np.random.default_rng(tokens)
    sizes = {"q": (7, WIDTH), "k": (2 * WIDTH,), "weights": (7,)}
    made = {n: jnp.asarray(rng.standard_normal((rows, tokens, *size)), jnp.float32) for n, size in sizes.items()}
    bias = jnp.asarray(rng.standard_normal((6, WIDTH)), jnp.float32)
    return PooledIndex(made["q"], made["k"], bias, 3, 6, made["weights"])


def of_heads_by_a_loop(index: HeadIndex, row: int, first: int, stop: int) -> np.ndarray:
    """bool [K, n, n] of the text in a row from `first` to `stop`, as transformers has it: scores of tokens that a query
    sees, the highest of each block, and those of its own and the last ones above all."""
    q, k = (np.asarray(a[row, first:stop]) for a in (index.q, index.k))
    length, found = stop - first, np.zeros((HEADS, stop - first, stop - first), bool)
    for head in range(HEADS):
        for t in range(length):
            scores = np.full(-(-length // index.block), -np.inf)
            for s in range(t + 1):
                scores[s // index.block] = max(scores[s // index.block], q[t, head] @ k[s])
            for back in range(index.last):
                scores[max(t // index.block - back, 0)] = np.inf
            for block in np.argsort(-scores, kind="stable")[: index.blocks + index.last]:
                found[head, t, block * index.block : (block + 1) * index.block] = True
    return found & np.tri(length, dtype=bool)


def pooled_by_a_loop(index: PooledIndex, row: int, first: int, stop: int) -> np.ndarray:
    """bool [n, n] of the text in a row from `first` to `stop`."""
    q, both, weights = (np.asarray(a[row, first:stop]) for a in (index.q, index.k, index.weighing))
    k, gate = both[:, :WIDTH], both[:, WIDTH:]
    length, rate, keys = stop - first, index.block, []
    for pool in range(length // rate):
        inside = slice(pool * rate, (pool + 1) * rate)
        shares = np.exp(gate[inside] + np.asarray(index.scale))
        keys.append((shares / shares.sum(0) * k[inside]).sum(0))
    found = np.zeros((length, length), bool)
    for t in range(length):
        whole = (t + 1) // rate
        scores = [weights[t] @ np.maximum(q[t] @ key, 0) for key in keys[:whole]]
        for pool in np.argsort(-np.array(scores), kind="stable")[: index.blocks]:
            found[t, pool * rate : (pool + 1) * rate] = True
        found[t, whole * rate : t + 1] = True
    return found


CASES = {"heads": (of_heads, of_heads_by_a_loop), "pooled": (pooled, pooled_by_a_loop)}


@pytest.mark.parametrize("kind", CASES)
def test_choices_in_packed_rows(kind):
    """Texts that begin anywhere, one that ends within a block, and padding behind."""
    make, loop = CASES[kind]
    texts, index = [[(0, 10), (10, 39)], [(0, 35)]], make(40, 2)
    segment_ids, positions = np.zeros((2, 2, 40), np.int32)
    expected = np.zeros((2, *[HEADS] * (kind == "heads"), 40, 40), bool)
    for row, own in enumerate(texts):
        for number, (first, stop) in enumerate(own):
            segment_ids[row, first:stop], positions[row, first:stop] = number + 1, np.arange(stop - first)
            expected[row, ..., first:stop, first:stop] = loop(index, row, first, stop)
    choose = (head_choice if kind == "heads" else block_choice).chosen_in_rows
    found = np.moveaxis(np.asarray(jax.jit(choose)(index, positions, segment_ids)), -2, 1)
    real = segment_ids > 0
    np.testing.assert_array_equal(found[real], np.moveaxis(expected, -2, 1)[real])


def empty(implementation: str, pages: int, heads: int, size: int) -> jax.Array:
    order = order_of(INDEX, jnp.float32, implementation)
    return jnp.zeros(pool_shape(order, pages, PAGE, heads, size))


@pytest.mark.wide  # the kernel, interpreted, takes 5 s of a core
@pytest.mark.parametrize("kind", CASES)
def test_choices_over_pages(kind):
    """In two chunks: as masks where pages are gathered, and as places that the kernel, interpreted, reads."""
    B, T, N, H = 2, 44, 4, 16
    make, loop = CASES[kind]
    index, rng, width = make(T, B), np.random.default_rng(0), -(-T // PAGE)
    latents = kind == "pooled"
    K, choice = (1, block_choice) if latents else (HEADS, head_choice)
    table = jnp.asarray(1 + rng.permutation(B * width).reshape(B, width), jnp.int32)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, n, H)), jnp.float32) for n in (N, K, K))
    v = k if latents else v
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    expected = jnp.asarray(np.stack([loop(index, row, 0, T) for row in range(B)]))
    if latents:
        attended = attend(q, k, v, expected, H**-0.5)
    else:
        rows = expected.reshape(B * K, T, T)
        attended = from_heads(attend(*by_heads(q, k, v), rows, H**-0.5), K)

    def chunk(part, pools, implementation):
        own = {name: getattr(index, name)[:, part] for name in ("q", "k", *["weighing"] * latents)}
        where = (table, positions[:, part], jnp.ones((B, T), bool)[:, part], jnp.int32(0))
        of_chunk = dataclasses.replace(index, **own)
        chosen, held = choice.choose(of_chunk, {INDEX: pools.pop(INDEX)}, INDEX, *where, implementation)
        new = {name: a[:, part] for name, a in (("k", k), ("v", v)) if name in pools}
        pools = paged_attention.write(pools, new, *where, implementation=implementation)
        how = {"scale": H**-0.5, "interpret": True}
        if isinstance(chosen, dict):
            chosen = paged_choice.attend(q[:, part], pools["k"], None, chosen, jnp.int32(0), value_dim=H, **how)
        elif implementation == "pallas":
            each = [(head_choice.of_head(chosen, head), jnp.int32(head)) for head in range(K)]
            parts = zip(jnp.split(q[:, part], K, axis=2), each, strict=True)
            outs = [block_choice.attend(a, pools, own, jnp.int32(0), head=head, **how) for a, (own, head) in parts]
            chosen = jnp.concatenate(outs, axis=2)
        return chosen, pools | held

    pages, size = 1 + B * width, index.k.shape[-1]
    masks = {INDEX: empty("blocked", pages, 1, size)}
    pools = {INDEX: empty("pallas", pages, 1, size), "k": empty("pallas", pages, K, H)}
    pools |= {} if latents else {"v": empty("pallas", pages, K, H)}
    for part in (slice(0, CUT), slice(CUT, T)):
        mask, masks = chunk(part, masks, "blocked")
        seen = mask[..., :T] & (np.arange(T) <= np.arange(T)[part, None])
        np.testing.assert_array_equal(seen, expected[..., part, :])
        out, pools = chunk(part, pools, "pallas")
        np.testing.assert_allclose(out, attended[:, part], atol=1e-5)
