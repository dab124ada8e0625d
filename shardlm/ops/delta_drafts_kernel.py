"""Tokens that may turn out wrong (delta_drafts.py) on NVIDIA GPUs: a Pallas kernel, by way of Triton, that takes states
from the slots where they lie, reads them for all tokens of a row, and leaves them there with those that stayed: one
read and one write, where XLA reads a state three times and writes it twice (delta_step_kernel.py: the same of one
token)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from shardlm.ops.delta_drafts import MOST, Few
from shardlm.ops.delta_step_kernel import columns_of, has_tiles


def pallas(few: Few, states: jax.Array, slot: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `delta_drafts.at_once`, but that `states` float32 [S, N, H, V] are those of all slots, and `slot` int32 [B]
    says which is a row's: returns (out [B, N, T, V], the states of all slots, in place). Rows that share a slot
    (padding) leave one of theirs there. `interpret` runs it anywhere, slowly."""
    B, N, T, _ = few.scores.shape
    H, V = states.shape[-2:]
    columns = columns_of(H, V)
    made = jax.ShapeDtypeStruct((B, N, T, V), jnp.float32), jax.ShapeDtypeStruct(states.shape, states.dtype)
    how = {"grid": (B, N, V // columns), "compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    kernel = functools.partial(_kernel, columns)
    given = slot, *few, states
    call = pl.pallas_call(
        kernel, made, input_output_aliases={len(given) - 1: 1}, interpret=interpret, name="delta_drafts", **how
    )
    out, states = call(*given)
    return out, states


def fits(tokens: int, states: jax.Array) -> bool:
    """Whether there is a kernel for so many tokens of a row, those that may stay included."""
    return tokens <= MOST and has_tiles(states)


def _kernel(width, slot, by, beta, v, L, scores, brought, held, states, out, new):
    row, head, columns = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * width, width)
    place, (T, C) = slot[row], scores.shape[2:]
    state = states[place, head, :, columns]  # [H, columns]
    read = lambda token: jnp.sum(state * by[row, head, token][:, None], axis=0)  # noqa: E731
    changes: list[jax.Array] = []
    for token in range(C):
        change = v[row, head, token, columns] - read(token)
        change *= beta[row, head, token]
        for before in range(token):
            change -= L[row, head, token, before] * changes[before]
        changes.append(change)
    for token in range(T):
        made = read(C + token)
        for before in range(C):
            made += scores[row, head, token, before] * changes[before]
        out[row, head, token, columns] = made
    state *= held[row, head, 0] if held.shape[2] == 1 else held[row, head][:, None]
    for token in range(brought.shape[2]):
        state += brought[row, head, token][:, None] * changes[token][None]
    new[place, head, :, columns] = state
