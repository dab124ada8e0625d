"""What few tokens' queries, keys and values have before attention over pages (rotate_write.py) on NVIDIA GPUs: a Pallas
kernel, by way of Triton, with a program of one warp for each head of a token. Pools are written where they lie."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.rotate_write import Unrotated


class Head(NamedTuple):
    """What is known when compiling of one of queries, keys and values.

    pieces  of a head's numbers, the first and how many: two of them that rotate each other, and what stays
    splits  of the sums
    summed, eps        of the norm of rows that were multiplied; None: without
    norm_eps, offset   of the head's own norm; None: without
    rotates
    """

    pieces: tuple[tuple[int, int], ...]
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
    B, T, N, H = made.shape
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
    call = pl.pallas_call(
        functools.partial(_kernel, {name: _head_of(made, name) for name in made.sums}),
        [jax.ShapeDtypeStruct((B, T, N, H), made.sums["q"].dtype), *(_like(pages[name]) for name in "kv")],
        grid=(N + 2 * pages["k"].shape[2], B * T),
        input_output_aliases={0: 1, 1: 2},
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="rotate_write",
    )
    q, k, v = call(pages["k"], pages["v"], inputs)
    return q, {"k": k, "v": v}


def _like(a: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def _head_of(made: Unrotated, name: str) -> Head:
    sums, norm = made.sums[name], made.norms.get(name)
    width, rotates = sums.parts.shape[-1], made.sines is not None and name != "v"
    half = made.sines[0].shape[-1] if rotates else 0
    pieces = (0, half), (half, half), (2 * half, width - 2 * half)
    return Head(
        tuple(piece for piece in pieces if piece[1]),
        sums.parts.shape[0],
        sums.summed,
        None if sums.squares is None else sums.eps,
        norm and norm.eps,
        norm.offset if norm else 0.0,
        rotates,
    )


def _kernel(heads: dict[str, Head], held_k, held_v, refs, q, k, v):
    del held_k, held_v  # the same memory as k and v
    head, row = pl.program_id(0), pl.program_id(1)
    tokens, queries, each = q.shape[1], q.shape[2], k.shape[2]
    b, t = jax.lax.div(row, tokens), jax.lax.rem(row, tokens)

    @pl.when(head < queries)
    def _():
        for columns, inside, numbers in _made(heads["q"], "q", refs, b, t, head):
            triton.store(q.at[b, t, head, columns], numbers.astype(q.dtype), mask=inside)

    def written(name: str, pool, own):
        page, offset, there = _place(refs, b, t, pool.shape[1])

        @pl.when(there)
        def _():
            for columns, inside, numbers in _made(heads[name], name, refs, b, t, own):
                triton.store(pool.at[page, offset, own, columns], numbers.astype(pool.dtype), mask=inside)

    pl.when((head >= queries) & (head < queries + each))(lambda: written("k", k, head - queries))
    pl.when(head >= queries + each)(lambda: written("v", v, head - queries - each))


def _place(refs, b, t, page_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(page of the pool, position in it, whether a token is written at all)."""
    position = refs["positions"][b, t]
    number, offset = jax.lax.div(position, page_size), jax.lax.rem(position, page_size)
    there = (refs["valid"][b, t] != 0) & (number < refs["table"].shape[1])
    page = triton.load(refs["table"].at[b, number], mask=there, other=0)
    return refs["first"][0] + page, offset, there & (page > 0)


def _made(how: Head, name: str, refs, b, t, head) -> list[tuple[jax.Array, jax.Array | None, jax.Array]]:
    """(columns, which of them there are, numbers float32) of each piece of a head."""
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
        width = sum(count for _, count in how.pieces)
        inverse = jax.lax.rsqrt(sum(jnp.sum(a * a) for a in made) / width + how.norm_eps)
        scales = [_load(refs["scales"][name].at[columns], inside).astype(jnp.float32) for columns, inside in where]
        made = [a * inverse * (scale + how.offset) for a, scale in zip(made, scales, strict=True)]
    if how.rotates:
        first, second, *rest = made
        sin, cos = (_load(a.at[b, t, 0, where[0][0]], where[0][1]) for a in refs["sines"])
        made = [first * cos - second * sin, second * cos + first * sin, *rest]
    return [(*place, a) for place, a in zip(where, made, strict=True)]


def _columns(first: int, count: int) -> tuple[jax.Array, jax.Array | None]:
    """(`count` columns, a power of two of them, and which of these there are; None: all)."""
    column = jnp.arange(pl.next_power_of_2(count))
    return first + column, None if column.size == count else column < count


def _sum(splits: int, part: Callable[[int], jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, (part(s) for s in range(splits)))


def _load(ref, mask: jax.Array | None) -> jax.Array:
    """Zero beyond the mask."""
    return triton.load(ref) if mask is None else triton.load(ref, mask=mask, other=0)
