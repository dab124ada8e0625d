"""Attention over pages against its reference, and what a row's output depends on. One list of shapes for all
implementations; the kernel for GPUs is interpreted."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardlm.ops import paged_rows
from shardlm.ops.attention import attend
from shardlm.ops.cudnn_heads import traced_for
from shardlm.ops.kv_format import as_heads, order_of, packed, parts_of_page, unpacked
from shardlm.ops.paged_attention import blocked, choose, implementation, reference, write, write_pages
from shardlm.ops.paged_kernel import pallas
from shardlm.ops.paged_sizes import sizes_of

PAGE, WIDTH = 4, 160  # 640 positions: five blocks of a loop, two parts of the kernel's
LARGE = 64  # of which `blocked` leaves pages as they lie
IMPLEMENTATIONS = {"blocked": blocked, "pallas": functools.partial(pallas, interpret=True)}


def laid(pools: dict, name: str) -> dict:
    """Pools [pages, page_size, K, H] as an implementation holds them."""
    return {entry: jnp.einsum(f"pskh->{order_of(entry, pool.dtype, name)}", pool) for entry, pool in pools.items()}


def inputs(heads: int, kv_heads: int, length: int, ends: tuple[int, ...], width: int = 8, page: int = PAGE):
    """Queries at the last `length` positions of rows that end at `ends`, and pools filled with noise."""
    rng, each = np.random.default_rng(0), WIDTH * PAGE // page
    rows, pages = len(ends), len(ends) * each + 1
    q = rng.normal(size=(rows, length, heads, width)).astype(np.float32)
    k, v = (rng.normal(size=(2 * pages, page, kv_heads, width)).astype(np.float32) for _ in range(2))
    table = rng.permutation(np.arange(1, pages)).reshape(rows, each).astype(np.int32)
    positions = np.stack([np.maximum(np.arange(end - length, end), 0) for end in ends]).astype(np.int32)
    return q, k, v, table, positions, np.int32(pages)


def until(positions, first: int = 0, end: int = 0) -> dict:
    """The option of tokens that see those of the same image, from `first` to `end` of each row; none without."""
    if not end:
        return {}
    return {"until": positions.at[:, first:end].set(positions[:, end - 1 : end])}


# heads, kv heads, tokens, width of a head, options. Rows of 640, 20, 300 positions, one of padding, and the same again
# up to `rows`, which groups do not divide.
SHAPES = {
    "decode": (4, 2, 1, 8, {"sinks": True}),
    "many rows": (4, 2, 1, 8, {"rows": 11, "window": 200}),
    "chunk": (4, 1, 17, 16, {"softcap": 3.0, "window": 130}),
    "chunks": (4, 2, 17, 8, {"chunk": 150, "sinks": True}),
    "decode in chunks": (4, 2, 1, 8, {"chunk": 60}),
    "image": (4, 2, 17, 8, {"ahead": (3, 11)}),
    "image in a window": (4, 2, 17, 8, {"ahead": (5, 16), "window": 130}),
    "latents": (3, 1, 2, 24, {"value_dim": 18}),
    "one head of two": (4, 2, 1, 8, {"head": 1, "window": 7}),
    "int8": (6, 3, 3, 20, {"how": "int8", "softcap": 30.0}),
    "fp8 latents": (2, 1, 1, 24, {"how": "fp8", "value_dim": 18}),
    "int8 latents of a head": (4, 2, 1, 8, {"how": "int8", "value_dim": 4, "head": 0}),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name, page", [*((name, PAGE) for name in IMPLEMENTATIONS), ("blocked", LARGE)])
@pytest.mark.parametrize("shape", SHAPES)
def test_implementations_equal_the_reference(shape, name, page):
    heads, kv_heads, length, width, options = SHAPES[shape]
    options = dict(options)
    ends = (640, 20, 300, 0) * 3
    q, k, v, *rest = map(jnp.asarray, inputs(heads, kv_heads, length, ends[: options.pop("rows", 4)], width, page))
    how, head, value_dim = (options.pop(key, None) for key in ("how", "head", "value_dim"))
    options |= until(rest[1], *options.pop("ahead", ()))
    if options.pop("sinks", False):
        options["sinks"] = jnp.linspace(-1, 2, heads)
    scales = {}
    held = {"k": k} if value_dim else {"k": k, "v": v}
    if how:
        for entry, pool in held.items():
            held[entry], scale = packed(pool, how)
            scales |= {} if scale is None else {f"{entry}_scale": scale}
        k, v = (unpacked(*packed(pool, how), jnp.float32) for pool in (k, v))
    if value_dim:
        v = k[..., :value_dim]
    own = slice(None) if head is None else slice(head, head + 1)
    expected = jax.jit(lambda q, k, v: reference(q, k[:, :, own], v[:, :, own], *rest, 0.3, **options))(q, k, v)
    if head is not None:
        options["head"] = jnp.int32(head)
    held = laid(held | scales, name)
    scales = {entry: held.pop(entry) for entry in scales}
    options |= scales | ({"value_dim": value_dim} if value_dim else {})
    found = jax.jit(lambda q, held: IMPLEMENTATIONS[name](q, held["k"], held.get("v"), *rest, 0.3, **options))(q, held)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-6)  # sums in another order


# Of whole pages where they lie: heads, kv heads, width of a head, options.
IN_PLACE = {
    "decode": (4, 2, 16, {"sinks": True}),
    "many rows": (8, 1, 32, {"rows": 11, "window": 200}),
    "chunks": (3, 3, 16, {"chunk": 60, "softcap": 3.0}),
}


@pytest.mark.parametrize("shape", IN_PLACE)
def test_pages_that_are_read_where_they_lie_equal_the_reference(shape, monkeypatch):
    monkeypatch.setattr(paged_rows, "cores", lambda: 2)
    heads, kv_heads, width, options = IN_PLACE[shape]
    options = dict(options)
    ends = ((640, 20, 300, 0) * 3)[: options.pop("rows", 4)]
    q, k, v, *rest = map(jnp.asarray, inputs(heads, kv_heads, 1, ends, width, LARGE))
    if options.pop("sinks", False):
        options["sinks"] = jnp.linspace(-1, 2, heads)
    expected = jax.jit(lambda *given: reference(*given, *rest, 0.3, **options))(q, k, v)
    held = laid({"k": k, "v": v}, "blocked").values()
    assert paged_rows.suits(q, *held)
    found = jax.jit(lambda *given: blocked(*given, *rest, 0.3, **options))(q, *held)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_which_pages_are_read_where_they_lie(monkeypatch):
    shapes = lambda heads, *pool, dtype=jnp.float32: (  # noqa: E731
        jax.ShapeDtypeStruct((2, 1, heads, 16), dtype),
        jax.ShapeDtypeStruct((9, *pool), dtype),
        jax.ShapeDtypeStruct((9, pool[0], pool[2], pool[1]), dtype),
    )
    monkeypatch.setattr(paged_rows, "cores", lambda: 2)
    assert paged_rows.suits(*shapes(4, 2, 16, 64)) and paged_rows.suits(*shapes(16, 2, 16, 64, dtype=jnp.uint16))
    assert not paged_rows.suits(*shapes(18, 2, 16, 64))  # nine queries of a kv head
    assert not paged_rows.suits(*shapes(4, 2, 24, 64)) and not paged_rows.suits(*shapes(4, 2, 16, 16))
    assert not paged_rows.suits(*shapes(4, 2, 16, 64, dtype=jnp.int16))  # 8 bits
    monkeypatch.setattr(paged_rows, "cores", lambda: 5)
    assert not paged_rows.suits(*shapes(4, 2, 16, 64))


@pytest.mark.parametrize("page", [PAGE, LARGE])
def test_positions_that_are_chosen_are_those_of_a_window(page):
    q, k, v, table, positions, first = map(jnp.asarray, inputs(4, 2, 1, (640, 20, 300), page=page))
    expected = jax.jit(lambda q: reference(q, k, v, table, positions, first, 0.3, 70))(q)
    k, v = laid({"k": k, "v": v}, "blocked").values()
    chosen = positions[..., None] - jnp.arange(640) < 70
    found = jax.jit(lambda q: blocked(q, k, v, table, positions, first, 0.3, chosen=chosen))(q)
    np.testing.assert_allclose(found, expected, atol=2e-6)


# Of so many rows that a block of keys which all of them see is not masked.
BFLOAT16 = {
    "chunk": (4, 1, 17, 16, {"softcap": 3.0, "window": 130}),
    "chunks": (8, 2, 17, 16, {"chunk": 150, "sinks": True}),
    "image": (8, 2, 17, 16, {"ahead": (2, 16), "window": 130}),
    "latents": (64, 1, 1, 288, {"value_dim": 272}),
    "int8 latents": (32, 1, 2, 288, {"value_dim": 272, "how": "int8"}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("capability", ["9.0", "10.0"])
@pytest.mark.parametrize("shape", BFLOAT16)
def test_the_kernel_in_bfloat16_equals_the_reference(shape, capability):
    """In float32 of the same numbers, for GPUs that take more keys at a time and others."""
    heads, kv_heads, length, width, options = BFLOAT16[shape]
    options = dict(options)
    q, k, v, *rest = map(jnp.asarray, inputs(heads, kv_heads, length, (640, 20, 300), width))
    q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
    how, value_dim = options.pop("how", None), options.get("value_dim")
    options |= until(rest[1], *options.pop("ahead", ()))
    if options.pop("sinks", False):
        options["sinks"] = jnp.linspace(-1, 2, heads)
    pools = {"k": k} if value_dim else {"k": k, "v": v}
    held = {"k": packed(k, how)[0], "k_scale": packed(k, how)[1]} if how else pools
    if how:
        k = unpacked(held["k"], held["k_scale"], jnp.float32)
    held = laid(held, "pallas")
    scales = {"k_scale": held["k_scale"]} if how else {}
    with traced_for(types.SimpleNamespace(compute_capability=capability)):
        arguments = (q.shape, q.dtype, held["k"], kv_heads, value_dim or width, bool(value_dim), WIDTH, True)
        more = bool(value_dim) and (capability == "9.0" or bool(how))
        assert sizes_of(*arguments).block_keys == (64 if more or not value_dim else 32)
        found = jax.jit(lambda: pallas(q, held["k"], held.get("v"), *rest, 0.1, **options, **scales, interpret=True))()
    options.pop("value_dim", None)
    k, v = k.astype(jnp.float32), (k[..., :value_dim] if value_dim else v).astype(jnp.float32)
    expected = jax.jit(lambda: reference(q.astype(jnp.float32), k, v, *rest, 0.1, **options))()
    np.testing.assert_allclose(
        found.astype(jnp.float32), expected, atol=0.004, rtol=2**-7
    )  # weights and output of 8 bits


@pytest.mark.parametrize(
    ("rows", "width", "seen", "splits"),
    [(1, 4096, 0, 16), (64, 4096, 0, 4), (64, 4097, 0, 5), (64, 1024, 0, 1), (64, 4096, 1024, 2), (1, 4096, 128, 3)],
)
def test_no_more_parts_than_there_may_be(rows, width, seen, splits):
    """Of 8 kv heads: tables of `width` positions, of which 64 rows have 1,024 in a part and one row 64."""
    pool = jax.ShapeDtypeStruct((9, 1, 8, 128), jnp.bfloat16)
    shape = (rows, 1, 32, 128), jnp.dtype(jnp.bfloat16)
    assert sizes_of(*shape, pool, 8, 128, False, width, True, seen=seen).splits == splits


def test_parts_of_a_window():
    """A window of 66 positions, over up to three blocks of 32 of them, and of one that one block may have."""
    ends = (640, 97, 96, 66, 65, 33, 32, 2, 1)
    for window in (1, 2, 66):
        q, k, v, *rest = map(jnp.asarray, inputs(4, 2, 1, ends))
        expected = reference(q, k, v, *rest, 0.3, window)
        found = jax.jit(lambda q, k, v: pallas(q, k, v, *rest, 0.3, window, interpret=True))(q, k, v)  # noqa: B023
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_tokens_of_an_image_see_all_of_it():
    """The reference against attention without pages."""
    q, k, v, table, positions, first = map(jnp.asarray, inputs(4, 2, 17, (20,)))
    own = jnp.concatenate([k[table[0] + first], v[table[0] + first]], axis=-1).reshape(1, -1, 2, 16)[:, :20]
    keys, queries = jnp.arange(20), positions[0]
    same = (queries[:, None] >= 5) & (queries[:, None] < 12) & (keys >= 5) & (keys < 12)
    mask = (keys <= queries[:, None]) | same
    expected = attend(q, own[..., :8], own[..., 8:], mask[None], 0.3)
    found = reference(q, k, v, table, positions, first, 0.3, **until(positions, 2, 9))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("length, width, page", [(1, 8, PAGE), (3, 8, PAGE), (1, 16, LARGE)])
def test_bits_of_bfloat16_are_bfloat16(length, width, page, monkeypatch):
    """Written and read: the same numbers, bit for bit, as pools of bfloat16."""
    monkeypatch.setattr(paged_rows, "cores", lambda: 2)
    q, k, v, table, positions, first = map(jnp.asarray, inputs(4, 2, length, (640, 20, 300, 30), width, page))
    rng = np.random.default_rng(1)
    new = {name: jnp.asarray(rng.normal(size=(4, length, 2, width)), jnp.float32) for name in ("k", "v")}
    where = (table, positions, jnp.arange(4)[:, None] + jnp.arange(length) < length + 2, first)

    def attended(dtype: type, q: jax.Array) -> tuple[jax.Array, jax.Array]:
        pools = {"k": k.astype(jnp.bfloat16), "v": v.astype(jnp.bfloat16)}
        pools = {name: pool.view(dtype) for name, pool in laid(pools, "blocked").items()}
        pools = write(pools, new, *where)
        assert pools["k"].dtype == dtype
        out = blocked(q, pools["k"], pools["v"], table, positions, first, 0.3)
        return out, pools["v"].view(jnp.bfloat16)

    attended = jax.jit(attended, static_argnums=0)
    for dtype in (jnp.float32, jnp.bfloat16):
        asked = q.astype(dtype)
        for found, expected in zip(attended(jnp.uint16, asked), attended(jnp.bfloat16, asked), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_what_is_chosen():
    assert choose("cpu") == "blocked" and choose("cuda") == choose("gpu") == "pallas"
    assert implementation("blocked") is blocked and implementation("pallas") is pallas


@pytest.mark.parametrize(
    "name, length, page, width, cores",
    [*((name, 3, PAGE, 8, 2) for name in IMPLEMENTATIONS), ("blocked", 1, LARGE, 16, 2), ("blocked", 1, LARGE, 16, 64)],
)
def test_a_row_does_not_depend_on_the_others(name, length, page, width, cores, monkeypatch):
    """Bit for bit: beside longer rows, in another place of the batch, over other pages; the kernel's also in a batch of
    another size, of as few programs that parts have as many keys."""
    monkeypatch.setattr(paged_rows, "cores", lambda: cores)
    q, k, v, table, positions, first = inputs(4, 2, length, (20, 21, 22, 23), width, page)
    k, v = laid({"k": k, "v": v}, name).values()
    run = jax.jit(lambda *a: IMPLEMENTATIONS[name](*a, 0.3))
    alone = run(q, k, v, table, positions, first)
    longer = positions.copy()
    longer[1:] += 530
    beside = run(q, k, v, table, longer, first)
    assert np.array_equal(alone[0], beside[0]) and not np.array_equal(alone[1], beside[1])
    order = np.array([3, 1, 2, 0])
    moved = run(q[order], k, v, table[order], longer[order], first)
    assert np.array_equal(moved[3], alone[0])
    if name == "pallas":
        assert np.array_equal(run(q[:2], k, v, table[:2], longer[:2], first), beside[:2])


def test_padding_is_written_nowhere():
    """Nor is what belongs into scrap, page 0, which several rows may have; all other places are told to be unlike."""
    pool = jnp.zeros((6, PAGE, 1, 2))
    table, positions = np.array([[2, 1], [0, 3]], np.int32), np.array([[3, 4, 5], [0, 4, 5]], np.int32)
    new = np.arange(1, 13, dtype=np.float32).reshape(2, 3, 1, 2)
    valid = np.array([[True, True, False], [True, True, True]])
    written = np.asarray(write_pages(pool, new, table, positions, valid, jnp.int32(0)))
    assert written[2, 3, 0].tolist() == [1, 2] and written[1, 0, 0].tolist() == [3, 4]
    assert written[3, :2, 0].tolist() == [[9, 10], [11, 12]] and np.count_nonzero(written) == 8
    text = jax.jit(write_pages).lower(pool, new, table, positions, valid, jnp.int32(0)).as_text()
    assert text.count("unique_indices = true") == text.count('"stablehlo.scatter"') == 1


@pytest.mark.parametrize("how", ["int8", "fp8"])
def test_eight_bits(how):
    """Numbers are within half a step of their format, zeros and those beyond its range too; pools hold what an array
    would."""
    rng = np.random.default_rng(0)
    new = rng.normal(size=(1, 2, 3, 64)) * np.array([1.0, 1e-3, 600.0])[:, None]
    new = jnp.asarray(new, jnp.float32).at[0, 0, 0].set(0)
    kept = np.clip(new, -448, 448) if how == "fp8" else np.asarray(new)
    largest = np.abs(new).max(axis=-1, keepdims=True)
    half_step = np.maximum(np.abs(kept) / 16, 2**-10) if how == "fp8" else largest / 254 * 1.001
    numbers = unpacked(*packed(new, how), jnp.float32)
    assert (np.abs(numbers - kept) <= half_step).all() and np.abs(new).max() > 448
    pages = {"k": jnp.zeros((2, PAGE, 3, 32), jnp.int16)}
    if how == "int8":
        pages["k_scale"] = jnp.zeros((2, PAGE, 3, 1))
    where = (np.array([[1]], np.int32), np.array([[0, 2]], np.int32), np.ones((1, 2), bool), jnp.int32(0))
    pages = write(pages, {"k": new}, *where, implementation="pallas")
    found = unpacked(pages["k"], pages.get("k_scale"), jnp.float32)
    np.testing.assert_array_equal(found[1, jnp.array([0, 2])], numbers[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_layers_whose_heads_differ_share_a_pool(name):
    """A page of two heads of 16 is two of one head of 16, each a layer's own."""
    wide, narrow, pages = (2, 16), (1, 16), 1 + WIDTH
    rng = np.random.default_rng(2)
    table = jnp.asarray(rng.permutation(np.arange(1, pages))[None], jnp.int32)
    positions = jnp.arange(40, dtype=jnp.int32)[None]
    pools = {entry: jnp.zeros((2 * pages, PAGE, *wide), jnp.float32) for entry in ("k", "v")}
    pools = laid(pools, name)
    orders = {entry: order_of(entry, pool.dtype, name) for entry, pool in pools.items()}
    # Of two places, the first is one layer's and the second two others'.
    layers = [(wide, 0, 0), (narrow, 1, 0), (narrow, 1, 1)]
    made = [
        {entry: jnp.asarray(rng.normal(size=(1, 40, *heads)), jnp.float32) for entry in "qkv"} for heads, _, _ in layers
    ]
    whole = {entry: pool.shape for entry, pool in pools.items()}
    where = []
    for (heads, place, part), new in zip(layers, made, strict=True):
        parts = parts_of_page(pools["k"], orders["k"], *heads)
        own = {entry: as_heads(pool, orders[entry], heads[0], parts) for entry, pool in pools.items()}
        where.append((table * parts, positions, jnp.int32(place * pages * parts + part)))
        here, at, first = where[-1]
        own = write(own, {"k": new["k"], "v": new["v"]}, here, at, at >= 0, first, implementation=name)
        pools = {entry: pool.reshape(whole[entry]) for entry, pool in own.items()}
    for (heads, _, _), new, own in zip(layers, made, where, strict=True):
        parts = parts_of_page(pools["k"], orders["k"], *heads)
        k, v = (as_heads(pools[entry], orders[entry], heads[0], parts) for entry in "kv")
        found = IMPLEMENTATIONS[name](new["q"], k, v, *own, 0.25)
        expected = attend(new["q"], new["k"], new["v"], jnp.tril(jnp.ones((1, 40, 40), bool)), 0.25)
        np.testing.assert_allclose(found, expected, atol=2e-6)
