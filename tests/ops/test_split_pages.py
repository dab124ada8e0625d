"""Pages whose positions are split over devices hold, and give, what whole ones do: latents and kv heads that all
devices share, of few tokens and of chunks, against attention over whole pages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from small import mesh_of

from shardlm.mesh import MeshSpec, shard_map
from shardlm.ops import paged_attention, split_pages
from shardlm.ops.attention import attend
from shardlm.ops.kv_format import order_of
from shardlm.ops.paged_attention import blocked, write
from shardlm.ops.paged_kernel import pallas
from shardlm.ops.split_pages import SplitPages, gathered_positions

SPEC = MeshSpec(expert=2, tensor=2)
AXES = ("expert", "tensor")
PAGE, WIDTH = 8, 9  # positions of a page, pages of a row
# kv heads, tokens of a row, axes, options. Rows end at 70, 3 (whose positions are all of the first devices), 33 and 8.
SHAPES = {
    "latents": (1, 1, AXES, {"value_dim": 12}),
    "drafts": (1, 3, AXES, {"value_dim": 12, "sinks": True}),
    "latents over one axis": (1, 1, ("expert",), {"value_dim": 12}),
    "a chunk of latents": (1, 11, AXES, {"value_dim": 12, "sinks": True, "softcap": 4.0}),
    "a chunk in blocks": (1, 11, AXES, {"value_dim": 12, "blocks": 3 * PAGE}),
    "a chunk over one axis": (1, 11, ("tensor",), {"value_dim": 12}),
    "kv heads": (2, 1, AXES, {"softcap": 4.0}),
    "a chunk of kv heads": (2, 11, AXES, {}),
    "a window": (2, 1, AXES, {"window": 16}),
    "a window of drafts": (2, 3, AXES, {"window": 8, "sinks": True}),
    "a window of an image": (2, 6, AXES, {"window": 8, "ahead": (1, 5)}),
    "a chunk with a window": (2, 11, AXES, {"window": 16}),
    "a chunk of an image with a window": (2, 11, AXES, {"window": 8, "ahead": (2, 9)}),
    "a window in blocks": (2, 11, AXES, {"window": 40, "ahead": (2, 9), "blocks": 2 * PAGE}),
    "an image": (1, 11, AXES, {"value_dim": 12, "ahead": (2, 9)}),
    "latents in int8": (1, 1, AXES, {"value_dim": 12, "how": "int8"}),
    "a chunk in int8": (2, 11, AXES, {"how": "int8"}),
}
ENDS = (70, 3, 33, 8)


def texts(kv_heads: int, tokens: int, own_values: bool):
    """Queries [B, T, 8, 16], keys and values of rows as long as pages are, page table, positions."""
    rng, rows = np.random.default_rng(0), len(ENDS)
    q = rng.normal(size=(rows, tokens, 8, 16))
    k, v = (rng.normal(size=(rows, WIDTH * PAGE, kv_heads, 16)) for _ in range(2))
    table = rng.permutation(np.arange(1, rows * WIDTH + 1)).reshape(rows, WIDTH)
    positions = np.stack([np.maximum(np.arange(end - tokens, end), 0) for end in ENDS])
    new = {"k": k, "v": v} if own_values else {"k": k}
    as_float, as_int = (lambda a, dtype=dtype: jnp.asarray(a, dtype) for dtype in (jnp.float32, jnp.int32))
    return as_float(q), jax.tree.map(as_float, new), as_int(table), as_int(positions)


def pools_of(new: dict, how: str, name: str) -> tuple[dict, dict]:
    """(empty pools of two layers, whole, the order of each)."""
    pages, dtype = 2 * (len(ENDS) * WIDTH + 1), jnp.dtype(jnp.int16 if how else jnp.float32)
    found, orders = {}, {}
    for entry, a in new.items():
        widths = {entry: (a.shape[3] // 2 if how else a.shape[3], dtype)}
        widths |= {entry + "_scale": (1, jnp.dtype(jnp.float32))} if how else {}
        for one, (width, kind) in widths.items():
            orders[one] = order_of(one, kind, name)
            sizes = {"p": pages, "s": PAGE, "k": a.shape[2], "h": width}
            found[one] = jnp.zeros([sizes[letter] for letter in orders[one]], kind)
    return found, orders


def rounded(a: jax.Array, how: str) -> jax.Array:
    if not how:
        return a
    step = jnp.max(jnp.abs(a), axis=-1, keepdims=True) / 127
    return jnp.round(a / step) * step


@pytest.mark.parametrize("name", ["blocked", "pallas"])
@pytest.mark.parametrize("shape", SHAPES)
def test_split_pages_are_whole_ones(shape, name, monkeypatch):
    kernels = {"blocked": blocked, "pallas": functools.partial(pallas, interpret=True)}
    monkeypatch.setattr(paged_attention, "implementation", kernels.get)
    kv_heads, tokens, axes, options = SHAPES[shape]
    options = {"scale": 0.3, "softcap": 0.0, "value_dim": 0} | options
    how, sinks, window = options.pop("how", ""), options.pop("sinks", False), options.pop("window", 0)
    first, end = options.pop("ahead", (0, 0))
    if size := options.pop("blocks", 0):  # of two pages, and then of three
        monkeypatch.setattr(split_pages, "FIRST_BYTES", 1)
        monkeypatch.setattr(split_pages, "block_positions", lambda rows, nbytes: size)
    q, new, table, positions = texts(kv_heads, tokens, not options["value_dim"])
    pools, orders = pools_of(new, how, name)
    last = positions.at[:, first:end].set(positions[:, end - 1 : end]) if end else positions
    sinks = jnp.linspace(-1, 2, 8) if sinks else None
    layer = jnp.int32(len(ENDS) * WIDTH + 1)
    held, spread = {"s": axes}, PartitionSpec(None, None, AXES)
    in_pools = {one: PartitionSpec(*(held.get(letter) for letter in order)) for one, order in orders.items()}
    heads_here = 8 // (SPEC.size(*AXES))

    # A page that no query sees any more is another text's.
    gone = np.maximum(np.min(positions, axis=1, keepdims=True) - window + 1, 0) // PAGE if window else 0

    def local(q, new, pools, table, positions, last, sinks):
        split = SplitPages(axes, SPEC.size(*axes), orders, name)
        every = jnp.broadcast_to(jnp.arange(new["k"].shape[1]), new["k"].shape[:2])
        here, own = split.place(every, split.size(pools))
        pools = write(pools, new, table, here, own & (every <= last.max(1, keepdims=True)), layer, implementation=name)
        head = jax.lax.axis_index(AXES) * heads_here * kv_heads // 8
        left = jnp.where(np.arange(WIDTH) < gone, 0, table)
        until = last if end else None
        return split.attend(q, pools, left, positions, layer, sinks, head, options, window, until), pools

    whole = (PartitionSpec(),) * 3
    specs = (spread, PartitionSpec(), in_pools, *whole, PartitionSpec(AXES) if sinks is not None else PartitionSpec())
    with jax.set_mesh(mesh_of(SPEC)):
        args = (q, new, pools, table, positions, last, sinks)
        placed = jax.tree.map(jax.device_put, args, _shardings(specs, args))
        out, kept = jax.jit(shard_map(local, in_specs=specs, out_specs=(spread, in_pools)))(*placed)
    k = rounded(new["k"], how)
    v = k[..., : options["value_dim"]] if "v" not in new else rounded(new["v"], how)
    mask = jnp.arange(k.shape[1]) <= last[..., None]
    mask &= jnp.arange(k.shape[1]) > positions[..., None] - (window or k.shape[1])
    wanted = attend(q, k, v, mask, options["scale"], options["softcap"], sinks)
    np.testing.assert_allclose(out, wanted, atol=2e-5, rtol=1e-4)
    part = kept["k"].addressable_shards[0].data
    assert part.size * SPEC.size(*axes) == kept["k"].size
    if not how:  # each number is where whole pages have it
        own = jnp.einsum(f"{orders['k']}->pskh", jnp.asarray(np.asarray(kept["k"])))[layer + table[0]]
        length = int(last[0].max()) + 1
        np.testing.assert_array_equal(own.reshape(-1, *own.shape[2:])[:length], new["k"][0, :length])


def _shardings(specs, args):
    mesh = jax.sharding.get_mesh()
    return jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: jax.sharding.NamedSharding(mesh, spec), part),
        specs, args, is_leaf=lambda s: isinstance(s, PartitionSpec),
    )  # fmt: skip


def test_what_a_device_has_of_a_text_is_the_first_of_its_own():
    split = SplitPages(("tensor",), 4, {"k": "pskh"}, "blocked")
    positions = jnp.arange(3 * PAGE)[None]

    def local(positions):
        here, own = split.place(positions, PAGE // 4)
        return jnp.stack([jnp.where(own, here, -1), split.count(positions, PAGE // 4)])[None]

    spec = MeshSpec(tensor=4)
    with jax.set_mesh(mesh_of(spec)):
        run = shard_map(local, in_specs=PartitionSpec(), out_specs=PartitionSpec("tensor"))
        found = np.asarray(jax.jit(run)(positions))[:, :, 0]
    for here, count in found:
        own = here[here >= 0]
        np.testing.assert_array_equal(own, np.arange(len(own)))
        np.testing.assert_array_equal(count, np.cumsum(here >= 0))
    assert (found[:, 0] >= 0).sum(axis=0).tolist() == [1] * positions.size


def test_chunks_that_begin_texts_gather_little_besides():
    """Of latents of 1,152 bytes, in pages of 16: as many positions as the chunk has, or 8 MiB of them in all rows."""
    assert gathered_positions(2048, 1, 1152, 16) == (7296, 8192)
    assert gathered_positions(128, 16, 1152, 16) == (464, 7280)
    assert gathered_positions(2048, 8, 1152, 16) == (2048, 8192)
    assert gathered_positions(8192, 16, 1152, 16) == (7280, 7280)
