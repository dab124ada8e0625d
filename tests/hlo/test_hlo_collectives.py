"""What is read from compiled programs equals what can be worked out by hand: small programs on a 2 x 2 x 2 mesh."""

import dataclasses
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.hlo.collectives import collectives

MESH = {"a": 2, "b": 2, "c": 2}
SUBSETS = [axes for size in (1, 2, 3) for axes in itertools.combinations(MESH, size)]
ROWS, COLUMNS, TRIPS = 16, 8, 5
LOCAL = ROWS * COLUMNS * 4  # bytes of one device's float32 part


def mesh_of_eight():
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH))


@pytest.fixture(autouse=True)
def lines_of_this_file(monkeypatch):
    """The persistent cache would give back a program with the line numbers of an older text."""
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


def compiled(f, *shapes):
    """f is called on every device with its own part [ROWS, COLUMNS] of each argument."""
    mesh, spec = mesh_of_eight(), PartitionSpec(tuple(MESH))
    program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    whole = jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, spec))
    return program.lower(*[whole] * (len(shapes) or 1)).compile().as_text()


def every_kind(axes):
    """A loop of TRIPS around one collective of each kind over `axes`."""
    n = math.prod(MESH[axis] for axis in axes)
    ring = [(i, (i + 1) % n) for i in range(n)]

    def body(x, _):
        whole = jax.lax.all_gather(x, axes, tiled=True)
        x = jnp.sin(whole).reshape(n, ROWS, COLUMNS).max(0)
        x = jnp.cos(jax.lax.psum(x, axes))
        part = jnp.sin(jax.lax.psum_scatter(x, axes, tiled=True))
        x = jnp.cos(jax.lax.all_to_all(x + jnp.tile(part, (n, 1)), axes, 0, 0, tiled=True))
        return jnp.sin(jax.lax.ppermute(x, axes, ring)), None

    return lambda x: jax.lax.scan(body, x, None, length=TRIPS)[0]


@pytest.mark.parametrize("axes", SUBSETS, ids="+".join)
def test_every_kind_over_every_set_of_axes(axes):
    found = collectives(compiled(every_kind(axes)), MESH)
    n = 2 ** len(axes)
    share = LOCAL * (n - 1) / n
    expected = {  # kind: (bytes, sent)
        "all-gather": (n * LOCAL, n * share),
        "all-reduce": (LOCAL, 2 * share),
        "reduce-scatter": (LOCAL, share),
        "all-to-all": (LOCAL, share),
        "collective-permute": (LOCAL, LOCAL),
    }
    assert {one.kind: (one.bytes, one.wire_bytes) for one in found} == expected
    for one in found:
        assert (one.axes, one.group_size, one.count, one.depth) == (axes, n, TRIPS, 1)
        assert (one.dtype, one.asynchronous, one.phase, one.guess) == ("f32", False, "other", "")


def test_a_place_in_the_source_and_the_argument_that_is_gathered():
    def twice(weight):
        return jnp.sin(jax.lax.all_gather(weight, "b", tiled=True))[:ROWS]

    (one,) = collectives(compiled(twice), MESH)
    first = inspect.getsourcelines(twice)[1]
    assert one.argument == "weight"
    assert any(f.file == __file__ and f.line == first + 1 and f.function.endswith("twice") for f in one.frames)
    assert str(one.frames[0]) == f"hlo/test_hlo_collectives.py:{first + 1}"


def test_loops_multiply_and_the_backward_pass_is_told_apart():
    def loss(x, stack):
        def layer(x, w):
            whole = jax.lax.all_gather(w * x, ("a", "b"), tiled=True)
            return jnp.sin(whole.reshape(4, *x.shape).max(0)), None

        def twice(x, _):
            return jax.lax.scan(layer, x, stack)[0], None

        return jnp.sum(jax.lax.scan(twice, x, None, length=3)[0])

    def gradient(x):
        return jax.grad(loss, 1)(x, jnp.stack([x, 2 * x, 3 * x, 4 * x])).sum(0)

    found = collectives(compiled(gradient), MESH)
    by_phase = {(one.phase, one.kind): one for one in found}
    assert set(by_phase) == {("forward", "all-gather"), ("backward", "reduce-scatter")}
    assert all(one.count == 12 and one.depth == 2 and one.axes == ("a", "b") for one in found)
    assert {one.bytes for one in found} == {4 * LOCAL}


def test_a_loop_multiplies_by_a_limit_that_it_carries():
    def three(x):
        return jax.lax.fori_loop(
            0, jax.lax.optimization_barrier(jnp.int32(3)), lambda i, x: x + jax.lax.psum(x * i, "c"), x
        )

    (one,) = collectives(compiled(three), MESH)
    assert (one.count, one.guess) == (3, "")


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    def until(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x + jax.lax.psum(x, "c"), x)

    (one,) = collectives(compiled(until), MESH)
    assert (one.count, one.guess) == (1, "a loop of unknown length, counted once")


def test_of_branches_the_costliest_counts():
    def branch(x):
        costly = lambda x: jax.lax.psum(jnp.tile(x, (3, 1)), "a")[:ROWS]  # noqa: E731
        cheap = lambda x: jax.lax.psum(x, ("b", "c"))  # noqa: E731
        same = jax.lax.pmax(x[0, 0], ("a", "b", "c"))
        return jax.lax.cond(same > 0, cheap, costly, x)

    found = collectives(compiled(branch), MESH)
    guessed = {(one.kind, one.axes): one for one in found if one.guess}
    assert list(guessed) == [("all-reduce", ("a",))]
    assert guessed["all-reduce", ("a",)].guess == "the costliest branch of a conditional"


def test_equal_ones_are_one_entry():
    def two(x):
        for _ in range(2):
            x = jnp.sin(jax.lax.psum(jnp.cos(x), "a"))
        return x

    (one,) = collectives(compiled(two), MESH)
    assert one.count == 2 and dataclasses.replace(one, count=1) != one


def test_a_mesh_that_is_too_small_is_refused():
    text = compiled(lambda x: jax.lax.psum(x, "a"))
    with pytest.raises(ShardlmError, match=r"names device 7; the mesh \{'a': 2, 'b': 2\} has fewer"):
        collectives(text, {"a": 2, "b": 2})


def test_other_text_is_refused():
    with pytest.raises(ShardlmError, match="not the text of a compiled program"):
        collectives("module @jit_f {\n}\n", MESH)
