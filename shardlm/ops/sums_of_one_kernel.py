"""Matrices whose rows and columns sum to 1 (sums_of_one.py) on NVIDIA GPUs: a Pallas kernel, by way of Triton, in which
a thread has all S * S numbers of a token, so that no sum crosses threads. XLA launches three kernels an iteration where
there are many tokens, and where it makes one of all takes 10 s to compile it."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

TOKENS = 32  # a program's: a warp, as few so that 2,048 tokens are on half of a GPU's multiprocessors

Matrix = list[list[jax.Array]]
"""One array [TOKENS] for each number."""


def pallas(scores: jax.Array, iterations: int, eps: float, interpret: bool = False) -> jax.Array:
    """As `sums_of_one.reference`. `interpret` runs it anywhere, slowly."""
    kernel, flat = functools.partial(_kernel, iterations, eps), _flat(scores)
    made = pl.pallas_call(kernel, _like(flat), name="sums_of_one", **_how(flat, interpret))(flat)
    return made[: scores.size // flat.shape[1]].reshape(scores.shape)


def gradient(scores: jax.Array, given: jax.Array, iterations: int, eps: float, interpret: bool = False) -> jax.Array:
    """As `sums_of_one.gradient`. The matrices before each iteration are made anew and kept in an array of their own:
    1.2 KiB a token of 4 streams and 20 iterations."""
    kernel, flat = functools.partial(_kernel_back, iterations, eps, not interpret), _flat(scores)
    made = _like(flat), jax.ShapeDtypeStruct((iterations, *flat.shape), jnp.float32)
    call = pl.pallas_call(kernel, made, name="sums_of_one_back", **_how(flat, interpret))
    return call(flat, _flat(given))[0][: scores.size // flat.shape[1]].reshape(scores.shape)


def _flat(matrices: jax.Array) -> jax.Array:
    """[B, T, S, S] -> [tokens, S * S], with tokens of a program's number."""
    flat = matrices.reshape(-1, matrices.shape[-1] ** 2)
    return jnp.pad(flat, ((0, -flat.shape[0] % TOKENS), (0, 0)))


def _like(flat: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(flat.shape, jnp.float32)


def _how(flat: jax.Array, interpret: bool) -> dict:
    options = triton.CompilerParams(num_warps=1, num_stages=1)
    return {"grid": (flat.shape[0] // TOKENS,), "compiler_params": options, "interpret": interpret}


def _kernel(iterations, eps, scores, out):
    tokens = _tokens()
    begun = _begun(_read(scores, tokens), eps)
    _write(out, jax.lax.fori_loop(1, iterations, lambda _, mix: _iterated(mix, eps), begun), tokens)


def _kernel_back(iterations, eps, threads, scores, given, out, kept):
    tokens = _tokens()

    def forward(i, mix):
        _write(kept, mix, i, tokens)
        return _iterated(mix, eps)

    def back(turn, gradient):
        before = _read(kept, iterations - 1 - turn, tokens)
        return jax.vjp(lambda mix: _iterated(mix, eps), before)[1](gradient)[0]

    begun, begin_back = jax.vjp(lambda scores: _begun(scores, eps), _read(scores, tokens))
    jax.lax.fori_loop(1, iterations, forward, begun)
    if threads:  # what is read back may have been written by another
        triton.debug_barrier()
    [made] = begin_back(jax.lax.fori_loop(0, iterations - 1, back, _read(given, tokens)))
    _write(out, made, tokens)


def _begun(scores: Matrix, eps: float) -> Matrix:
    return _columns_divided([[each + eps for each in _softmax(row)] for row in scores], eps)


def _iterated(mix: Matrix, eps: float) -> Matrix:
    return _columns_divided([_divided(row, eps) for row in mix], eps)


def _softmax(row: list[jax.Array]) -> list[jax.Array]:
    largest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, row))
    return _divided([jnp.exp(each - largest) for each in row], 0.0)


def _divided(row: list[jax.Array], eps: float) -> list[jax.Array]:
    part = 1 / (sum(row[1:], row[0]) + eps)
    return [each * part for each in row]


def _columns_divided(mix: Matrix, eps: float) -> Matrix:
    columns = [_divided(list(column), eps) for column in zip(*mix, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _tokens() -> pl.Slice:
    """This program's."""
    return pl.ds(pl.program_id(0) * TOKENS, TOKENS)


def _read(ref, *at) -> Matrix:
    S = round(ref.shape[-1] ** 0.5)
    return [[ref[*at, i * S + j] for j in range(S)] for i in range(S)]


def _write(ref, matrix: Matrix, *at) -> None:
    for place, each in enumerate(each for row in matrix for each in row):
        ref[*at, place] = each
