"""Attention of chunks in two parts against the reference over pages: rows of any length before them, of none and of
padding; by XLA, and by what stands in for cuDNN, which a CPU has not: what jax says of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from shardlm.ops import chunk_attention
from shardlm.ops.chunk_attention import in_parts
from shardlm.ops.kv_format import order_of
from shardlm.ops.paged_attention import reference, write

PAGE, WIDTH, T, N, K, H, SCALE = 4, 20, 12, 4, 2, 8, 0.7
# Tokens before each row and in it: in the midst of a page, at the ends of pages and blocks, none, as many as there is
# room for, and padding.
ROWS = ((37, 12), (0, 12), (32, 7), (1, 12), (0, 3), (68, 12), (4, 1), (0, 0))
START, LENGTH = (np.array(each, np.int32) for each in zip(*ROWS, strict=True))


def contract(q, k, v, bias=None, *, scale, mask_type, return_residual, q_seqlen=None, kv_seqlen=None):
    """What cuDNN is asked for, (out, log-partition float32 [B, N, T]), and NaN where that is not said: queries of which
    no key is seen. Values of keys that are not there are multiplied by 0."""
    assert bias is None and return_residual and q.dtype.itemsize == 2
    (B, T), S = q.shape[:2], k.shape[1]
    if mask_type == fused.MaskType.CAUSAL:
        assert q_seqlen is None and kv_seqlen is None
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((T, S), bool)), (B, T, S))
    else:
        assert mask_type == fused.MaskType.PADDING and q_seqlen.dtype == kv_seqlen.dtype == jnp.int32
        seen = jnp.broadcast_to((jnp.arange(S) < kv_seqlen[:, None])[:, None], (B, T, S))
        seen &= (jnp.arange(T) < q_seqlen[:, None])[:, :, None]
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores).astype(q.dtype), v)
    return out.astype(q.dtype), jax.nn.logsumexp(scores, axis=-1)


def inputs(dtype, kv_heads=K, value_dim=H, seed=0):
    """(q, k, v of the chunks, pools [pages, page_size, K, H] full of numbers that no row may see, page table,
    positions, what is real, the first page)."""
    rng = np.random.default_rng(seed)
    B, pages = len(ROWS), len(ROWS) * WIDTH + 1
    q, k = (rng.normal(size=(B, T, heads, H)) for heads in (N, kv_heads))
    v = rng.normal(size=(B, T, kv_heads, value_dim))
    pools = [rng.normal(size=(2 * pages, PAGE, kv_heads, H)) for _ in range(2)]
    table = rng.permutation(np.arange(1, pages)).reshape(B, WIDTH).astype(np.int32)
    table = np.where(np.arange(WIDTH) * PAGE < (START + LENGTH)[:, None], table, 0)  # others have none: scrap
    index = np.arange(T, dtype=np.int32)
    positions = START[:, None] + np.minimum(index, np.maximum(LENGTH - 1, 0)[:, None])
    arrays = [jnp.asarray(a, dtype) for a in (q, k, v, *pools)]
    return *arrays[:3], dict(zip("kv", arrays[3:], strict=True)), table, positions, index < LENGTH[:, None], pages


def run(implementation, held_for, dtype, *, kv_heads=K, value_dim=H, sinks=None, head=None, block=32, monkeypatch):
    """(what the parts give, what the reference over pages gives in float32, which tokens are real)."""
    monkeypatch.setattr(chunk_attention, "BLOCK_KEYS", block)
    q, k, v, pools, table, positions, valid, first = inputs(dtype, kv_heads, value_dim)
    where = (table, positions, valid, jnp.int32(first))
    wide = jnp.pad(v, [(0, 0)] * 3 + [(0, H - value_dim)])
    written = write(pools, {"k": k, "v": wide}, *where, implementation="pallas")
    own = slice(None) if head is None else slice(head, head + 1)
    exact = (written[name][:, :, own].astype(jnp.float32) for name in "kv")
    expected = reference(q.astype(jnp.float32), *exact, table, positions, jnp.int32(first), SCALE, sinks=sinks)[
        ..., :value_dim
    ]
    read = np.unique(table[np.arange(WIDTH) * PAGE < START[:, None]])  # of all others nothing may be seen
    others = np.setdiff1d(np.arange(1, first), read) + first
    written = {name: a.at[others].set(jnp.nan) for name, a in written.items()}
    held = {name: jnp.einsum(f"pskh->{order_of(name, a.dtype, held_for)}", a) for name, a in written.items()}
    options = {"sinks": sinks, "held_for": held_for, "head": None if head is None else jnp.int32(head)}
    start = jnp.asarray(positions[:, 0])
    parts = jax.jit(lambda *a: in_parts(*a, table, start, jnp.int32(first), SCALE, implementation, **options))
    found = parts(q, k[:, :, own], v[:, :, own], held)
    assert found.shape == expected.shape and found.dtype == dtype
    assert jnp.all(jnp.isfinite(found))  # of padding too, which goes through the other layers
    return np.asarray(found, np.float32)[valid], np.asarray(expected)[valid]


@pytest.mark.parametrize("block", [4, 32, 8192], ids=["a page at a time", "several blocks", "one block"])
@pytest.mark.parametrize("held_for", ["pallas", "blocked"])
def test_parts_equal_the_reference(held_for, block, monkeypatch):
    found, expected = run("xla", held_for, jnp.float32, block=block, monkeypatch=monkeypatch)
    np.testing.assert_allclose(found, expected, atol=3e-6)  # sums in another order


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block": 8192},
        {"kv_heads": 1},
        {"kv_heads": N, "sinks": np.linspace(-1, 3, N)},
        {"head": 1},
        {"value_dim": 6},
    ],
    ids=["groups", "one block", "one kv head", "sinks", "one head of two", "narrow values"],
)
def test_what_cudnn_is_given(options, monkeypatch):
    """Off by the roundings of weights and of each part's result to bfloat16 (measured: up to 0.012)."""
    monkeypatch.setattr(fused, "dot_product_attention", contract)
    found, expected = run("cudnn", "pallas", jnp.bfloat16, monkeypatch=monkeypatch, **options)
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_blocks_are_bounded_in_bytes():
    sizes = ((1, 8), (4, 8), (16, 8), (4, 32))  # rows, kv heads of 128
    found = [chunk_attention.block_positions(rows, heads * 2 * 128 * 2) for rows, heads in sizes]
    assert found == [8192, 8192, 2048, 2048]
