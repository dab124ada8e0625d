"""The states that chunks of linear attention are given, one after the other (gated_delta_chunks.py), on NVIDIA GPUs: a
Pallas kernel, by way of Triton, in which a program carries some columns of one head's state through all chunks, as
flash-linear-attention has it (github.com/fla-org/flash-linear-attention, ops/common/chunk_delta_h.py). A loop of XLA's
launches six kernels a chunk, each for less work than it takes to launch."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

COLUMNS = 32  # of a state, which do not need each other: more programs than a GPU has cores, of 32 heads or more


def pallas(left, P, into, state, back: bool = False, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `gated_delta_chunks.through`. `interpret` runs it anywhere, slowly."""
    n, B, N, H, V = into.shape
    rows = B * N
    kernel = functools.partial(_kernel, n, back)
    made = jax.ShapeDtypeStruct((n, rows, H, V), P.dtype), jax.ShapeDtypeStruct((rows, H, V), jnp.float32)
    options = triton.CompilerParams(num_warps=4, num_stages=3)
    how = {"grid": (rows, V // COLUMNS), "compiler_params": options, "interpret": interpret, "name": "chunk_states"}
    left = left.reshape(n, rows) if left.shape[-1] == 1 else left.reshape(n, rows, H)
    flat = left, P.reshape(n, rows, H, H), into.reshape(n, rows, H, V), state.reshape(rows, H, V)
    states, last = pl.pallas_call(kernel, made, **how)(*flat)
    return states.reshape(into.shape), last.reshape(state.shape)


def fits(P: jax.Array, into: jax.Array) -> bool:
    """Whether there is a kernel for these: of 16 bits, whole tiles, and counted in 32 bits."""
    H, V = into.shape[-2:]
    of_tiles = H in (16, 32, 64, 128) and V % COLUMNS == 0
    return P.dtype.itemsize == 2 and of_tiles and max(P.size, into.size) < 2**31


def _kernel(n: int, back: bool, left, P, into, state, states, last):
    row, columns = pl.program_id(0), pl.ds(pl.program_id(1) * COLUMNS, COLUMNS)

    def step(turn, held):
        at = n - 1 - turn if back else turn
        given = held.astype(P.dtype)
        states[at, row, :, columns] = given
        read = triton.dot(P[at, row], given, trans_a=back)
        kept = left[at, row] if len(left.shape) == 2 else left[at, row][:, None]  # of all of a state, or of each row
        return kept * held + (read + into[at, row, :, columns])

    last[row, :, columns] = jax.lax.fori_loop(0, n, step, state[row, :, columns])
