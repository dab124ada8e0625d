"""Attention over pages against its reference, and what a row's output depends on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops.paged_attention import blocked, reference, write_pages

PAGE, WIDTH = 4, 40  # 160 positions: two blocks


def inputs(heads: int, kv_heads: int, length: int, ends: tuple[int, ...], seed: int = 0):
    """Queries at the last `length` positions of rows that end at `ends`, and pools filled with noise."""
    rng = np.random.default_rng(seed)
    rows, pages = len(ends), len(ends) * WIDTH + 1
    q = rng.normal(size=(rows, length, heads, 8)).astype(np.float32)
    k, v = (rng.normal(size=(2 * pages, PAGE, kv_heads, 8)).astype(np.float32) for _ in range(2))
    table = rng.permutation(np.arange(1, pages)).reshape(rows, WIDTH).astype(np.int32)
    positions = np.stack([np.arange(end - length, end) for end in ends]).astype(np.int32)
    return q, k, v, table, positions, np.int32(pages)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "options"),
    [
        (4, 2, 1, {}),
        (6, 6, 5, {"window": 7}),
        (4, 1, 17, {"softcap": 3.0, "window": 130}),
        (4, 2, 3, {"sinks": True}),
    ],
)
def test_blocks_equal_the_reference(heads, kv_heads, length, options):
    sinks = jnp.linspace(-1, 2, heads) if options.pop("sinks", False) else None
    args = inputs(heads, kv_heads, length, (160, 20, 129))
    found = jax.jit(lambda *a: blocked(*a, 0.3, sinks=sinks, **options))(*args)
    expected = reference(*args, 0.3, sinks=sinks, **options)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_values_inside_keys_and_one_head_of_a_whole_pool():
    q, k, _, *rest = map(jnp.asarray, inputs(4, 2, 2, (30, 150)))
    for head in range(2):
        own = k[:, :, head : head + 1]
        found = blocked(q, k, None, *rest, 0.3, value_dim=5, head=jnp.int32(head))
        np.testing.assert_allclose(found, reference(q, own, own[..., :5], *rest, 0.3), atol=2e-6)


def test_a_row_does_not_depend_on_the_others():
    """Bit for bit: beside longer rows, in another place of the batch, and over other pages."""
    q, k, v, table, positions, first = inputs(4, 2, 3, (20, 21, 22, 23))
    run = jax.jit(lambda *a: blocked(*a, 0.3))
    alone = run(q, k, v, table, positions, first)
    longer = positions.copy()
    longer[1:] += 130
    beside = run(q, k, v, table, longer, first)
    assert np.array_equal(alone[0], beside[0]) and not np.array_equal(alone[1], beside[1])
    order = np.array([3, 1, 2, 0])
    moved = run(q[order], k, v, table[order], longer[order], first)
    assert np.array_equal(moved[3], alone[0])


def test_padding_is_written_to_the_scrap_page():
    pool = jnp.zeros((6, PAGE, 1, 2))
    table, positions = np.array([[2, 1]], np.int32), np.array([[3, 4, 5]], np.int32)
    new = np.arange(1, 7, dtype=np.float32).reshape(1, 3, 1, 2)
    written = np.asarray(write_pages(pool, new, table, positions, np.array([[True, True, False]]), jnp.int32(0)))
    assert written[2, 3, 0].tolist() == [1, 2] and written[1, 0, 0].tolist() == [3, 4]
    assert written[0, 1, 0].tolist() == [5, 6] and np.count_nonzero(written) == 6
