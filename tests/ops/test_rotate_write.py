"""Queries, keys and values of few tokens in one kernel, interpreted, against what layers say in several steps. How it
is compiled is looked at in test_gpu_machine_code.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import rotate_write
from shardlm.ops.few_rows import Norm, Sums
from shardlm.ops.kv_format import numbers_of, packed
from shardlm.ops.rope import Rope, sines
from shardlm.ops.rotate_write import Unrotated

PAGE = 4
LAST = 3 * PAGE - 1  # position in a row's pages
# The reference rounds after each step; a number of 8 bits may be the next one.
NEAR = {
    "float32": {"rtol": 1e-5, "atol": 1e-5},
    "bfloat16": {"rtol": 2**-6, "atol": 0.06},
    "fp8": {"rtol": 2**-3, "atol": 2**-9},
    "int8": {"rtol": 1e-5, "atol": 0.1},
}


def made_of(rng, rows: int, tokens: int, heads: int, kv_heads: int, width: int, positions, **how) -> Unrotated:
    """Random sums in two parts, of rows that were normalised or (`plain`) not."""
    dtype, each = how.get("dtype", jnp.float32), {"q": heads, "k": kv_heads, "v": kv_heads}

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    plain, rope = how.get("plain", False), how.get("rope", Rope())
    squares = None if plain else 40 * jnp.abs(normal(2, rows, tokens)) + 1
    return Unrotated(
        {
            name: Sums(normal(2, rows, tokens, count, width), squares, 64, 0.0 if plain else 1e-5, dtype)
            for name, count in each.items()
        },
        {name: normal(count, width).astype(dtype) for name, count in each.items()} if how.get("bias") else {},
        {name: Norm(normal(width).astype(dtype), 1e-6, how["offset"]) for name in "qk"} if "offset" in how else {},
        sines(positions, rope, width) if rope else None,
    )


CASES = {
    "llama": (2, 1, 8, 2, 16, {}),
    "qwen 3": (3, 1, 4, 2, 32, {"offset": 0.0}),
    "qwen 2, drafts": (2, 5, 4, 2, 16, {"bias": True}),
    "gemma 3": (2, 1, 4, 1, 24, {"offset": 1.0}),  # its halves are no powers of two
    "a part of the head, norms behind": (5, 1, 4, 2, 20, {"rope": Rope(dim=8), "plain": True}),
    "no rotation": (2, 1, 4, 2, 16, {"rope": None, "bias": True, "offset": 0.0}),
    "fp8": (3, 2, 4, 2, 32, {"offset": 0.0, "held": "fp8"}),
    "int8, a part": (3, 1, 4, 2, 24, {"rope": Rope(dim=8), "held": "int8"}),
    "bfloat16": (4, 1, 8, 4, 16, {"dtype": jnp.bfloat16, "offset": 0.0, "bias": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_layers_do_in_several_steps(name):
    """The first row ends beyond its pages, the last one is padding, and the first page of the second is scrap."""
    rows, tokens, heads, kv_heads, width, how = CASES[name]
    rng = np.random.default_rng(0)
    dtype, held = how.get("dtype", jnp.float32), how.get("held", "auto")
    positions = np.add.outer(rng.integers(0, LAST - tokens, rows), np.arange(tokens)).astype(np.int32)
    positions[0] = LAST - (tokens > 1) + np.arange(tokens)
    valid = np.repeat(np.arange(rows) < rows - 1, tokens).reshape(rows, tokens)
    table = 1 + rng.permutation(rows * 3).reshape(rows, 3).astype(np.int32)
    table[1, 0] = 0
    pools = {name: jnp.asarray(rng.normal(size=(rows * 3 + 8, PAGE, kv_heads, width)), dtype) for name in "kv"}
    if held != "auto":
        pairs = {name: packed(pool, held) for name, pool in pools.items()}
        pools = {name: pair[0] for name, pair in pairs.items()}
        pools |= {f"{name}_scale": pair[1] for name, pair in pairs.items() if pair[1] is not None}
    made = made_of(rng, rows, tokens, heads, kv_heads, width, jnp.asarray(positions), **how)
    where = *map(jnp.asarray, (table, positions, valid)), jnp.int32(7)
    assert rotate_write.fits(pools)

    q, new = jax.jit(functools.partial(rotate_write.run, interpret=True))(made, pools, *where)
    wanted, expected = jax.jit(rotate_write.reference)(made, pools, *where)
    assert q.shape == (rows, tokens, heads, width) and q.dtype == dtype
    near = NEAR[how.get("held", jnp.dtype(dtype).name)]
    np.testing.assert_allclose(q.astype(np.float32), wanted.astype(np.float32), **near)
    page = np.take_along_axis(table, np.minimum(positions, LAST) // PAGE, axis=1)
    count = (valid & (positions <= LAST) & (page > 0)).sum()
    for name in "kv":
        found, right = (numbers_of(all[name], all.get(f"{name}_scale"), jnp.float32) for all in (new, expected))
        np.testing.assert_allclose(found, right, **near)
        changed = np.asarray(new[name] != pools[name]).any(axis=(2, 3))
        assert changed.sum() == count > 0
        np.testing.assert_array_equal(changed, np.asarray(expected[name] != pools[name]).any(axis=(2, 3)))


def test_what_pools_it_writes_into():
    pools = {name: jnp.zeros((3, PAGE, 2, 16), jnp.bfloat16) for name in "kv"}
    assert rotate_write.fits(pools)
    assert not rotate_write.fits({"k": pools["k"]})  # latents
    assert not rotate_write.fits({name: pool.view(jnp.uint16) for name, pool in pools.items()})
