"""What few tokens' queries, keys and values have before attention over pages (rotate_write.py) on NVIDIA GPUs: a Pallas
kernel, by way of Triton, with a program of one warp for each head of a token. Pools are written where they lie."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops import packed_numbers
from shardlm.ops.kv_format import SCALE, numbers_each, scale_of
from shardlm.ops.rotate_write import Unrotated

Made = list[tuple[tuple[jax.Array, jax.Array | None], jax.Array]]
"""Of each piece of a head (its columns, which of them there are; numbers float32)."""
Piece = tuple[int, int, int]  # of a head's numbers: the first, the distance to the next, and how many


class Head(NamedTuple):
    """What is known when compiling of one of queries, keys and values.

    pieces  of a head's numbers: as many that rotate each other one after the other, and what stays. Where pages hold
            two numbers in an element, the first and the second ones of these are pieces of their own
    pack    numbers in an element
    splits  of the sums
    summed, eps        of the norm of rows that were multiplied; None: without
    norm_eps, offset   of the head's own norm; None: without
    rotates
    """

    pieces: tuple[Piece, ...]
    pack: int
    splits: int
    summed: int
    eps: float | None
    norm_eps: float | None
    offset: float
    rotates: bool


def pallas(
    made: Unrotated,
    pages: dict[str, jax.Array],
    page_table: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    first_page: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """As `rotate_write.reference`; the arrays of one device."""
    B, T, N, _ = made.shape
    inputs = {
        "parts": {name: sums.parts for name, sums in made.sums.items()},
        "squares": made.sums["q"].squares,
        "biases": made.biases,
        "scales": {name: norm.scale for name, norm in made.norms.items()},
        "sines": made.sines,
        "table": page_table,
        "positions": positions,
        "valid": valid.astype(jnp.int32),
        "first": first_page[None],
    }
    heads = {name: _head_of(made, name, numbers_each(pages[name]) if name in pages else 1) for name in made.sums}
    q = jax.ShapeDtypeStruct(made.shape, made.sums["q"].dtype)
    call = pl.pallas_call(
        functools.partial(_kernel, heads, tuple(pages)),
        [q, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pages.values())],
        grid=(N + 2 * pages["k"].shape[2], B * T),
        input_output_aliases={i: 1 + i for i in range(len(pages))},
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_write",
    )
    q, *written = call(*pages.values(), inputs)
    return q, dict(zip(pages, written, strict=True))


def _head_of(made: Unrotated, name: str, pack: int) -> Head:
    sums, norm = made.sums[name], made.norms.get(name)
    width, rotates = sums.parts.shape[-1], made.sines is not None and name != "v"
    half = made.sines[0].shape[-1] if rotates else 0
    parts = (0, half), (half, half), (2 * half, width - 2 * half)
    return Head(
        tuple((first + i, pack, count // pack) for first, count in parts if count for i in range(pack)),
        pack,
        sums.parts.shape[0],
        sums.summed,
        None if sums.squares is None else sums.eps,
        norm and norm.eps,
        norm.offset if norm else 0.0,
        rotates,
    )


def _kernel(heads: dict[str, Head], names: tuple[str, ...], *refs):
    """`names` of the pools, which come before and, the same memory, behind all else."""
    refs, q, *pools = refs[len(names) :]
    pools = dict(zip(names, pools, strict=True))
    head, row = pl.program_id(0), pl.program_id(1)
    tokens, queries, each = q.shape[1], q.shape[2], pools["k"].shape[2]
    b, t = jax.lax.div(row, tokens), jax.lax.rem(row, tokens)

    @pl.when(head < queries)
    def _():
        for place, numbers in _made(heads["q"], "q", refs, b, t, head):
            _store(q, (b, t, head), place, numbers)

    def written(name: str, own):
        page, offset, there = _place(refs, b, t, pools[name].shape[1])

        @pl.when(there)
        def _():
            made = _made(heads[name], name, refs, b, t, own)
            _write(pools[name], pools.get(name + SCALE), (page, offset, own), made, heads[name].pack)

    pl.when((head >= queries) & (head < queries + each))(lambda: written("k", head - queries))
    pl.when(head >= queries + each)(lambda: written("v", head - queries - each))


def _write(pool, scales, at, made: Made, pack: int) -> None:
    """A head's numbers as its pool holds them (kv_format.py)."""
    if pack == 1:
        for place, numbers in made:
            _store(pool, at, place, numbers)
        return
    how = "fp8"
    if scales is not None:
        how, scale = "int8", scale_of(functools.reduce(jnp.maximum, (jnp.max(jnp.abs(a)) for _, a in made)))
        scales[(*at, 0)] = scale
        made = [(place, a / scale) for place, a in made]
    for ((column, inside), first), (_, second) in zip(made[::2], made[1::2], strict=True):
        low, high = (packed_numbers.byte_of(a, how) for a in (first, second))
        _store(pool, at, (column >> 1, inside), low | (high << 8))


def _place(refs, b, t, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(page of the pool, position in it, whether a token is written at all)."""
    position = refs["positions"][b, t]
    number, offset = jax.lax.div(position, page_size), jax.lax.rem(position, page_size)
    there = (refs["valid"][b, t] != 0) & (number < refs["table"].shape[1])
    page = triton.load(refs["table"].at[b, number], mask=there, other=0)
    return refs["first"][0] + page, offset, there & (page > 0)


def _made(how: Head, name: str, refs, b, t, head) -> Made:
    """A head, piece by piece."""
    where = [_columns(*piece) for piece in how.pieces]

    def added_up(columns, inside) -> jax.Array:
        return _sum(how.splits, lambda s: _load(refs["parts"][name].at[s, b, t, head, columns], inside))

    made = [added_up(*place) for place in where]
    if how.eps is not None:
        squares = _sum(how.splits, lambda s: refs["squares"][s, b, t])
        inverse = jax.lax.rsqrt(squares / how.summed + how.eps)
        made = [a * inverse for a in made]
    if name in refs["biases"]:
        own = [_load(refs["biases"][name].at[head, columns], inside) for columns, inside in where]
        made = [a + bias.astype(jnp.float32) for a, bias in zip(made, own, strict=True)]
    if how.norm_eps is not None:
        width = sum(count for _, _, count in how.pieces)
        inverse = jax.lax.rsqrt(sum(jnp.sum(a * a) for a in made) / width + how.norm_eps)
        scales = [_load(refs["scales"][name].at[columns], inside).astype(jnp.float32) for columns, inside in where]
        made = [a * inverse * (scale + how.offset) for a, scale in zip(made, scales, strict=True)]
    if how.rotates:
        first, second, still = made[: how.pack], made[how.pack : 2 * how.pack], made[2 * how.pack :]
        sin, cos = (
            [_load(a.at[b, t, 0, column], inside) for column, inside in where[: how.pack]] for a in refs["sines"]
        )
        turned = list(zip(first, second, sin, cos, strict=True))
        made = [a * c - z * s for a, z, s, c in turned] + [z * c + a * s for a, z, s, c in turned] + still
    return list(zip(where, made, strict=True))


def _columns(first: int, step: int, count: int) -> tuple[jax.Array, jax.Array | None]:
    """(`count` columns, a power of two of them, and which of these there are; None: all)."""
    number = jnp.arange(pl.next_power_of_2(count))
    return first + step * number, None if number.size == count else number < count


def _sum(splits: int, part: Callable[[int], jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, (part(s) for s in range(splits)))


def _load(ref, mask: jax.Array | None) -> jax.Array:
    """Zero beyond the mask."""
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=0)


def _store(ref, at, place, numbers: jax.Array) -> None:
    column, inside = place
    triton.store(ref.at[(*at, column)], numbers.astype(ref.dtype), mask=inside)
