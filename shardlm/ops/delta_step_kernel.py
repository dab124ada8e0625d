"""One token of each row by the gated delta rule (gated_delta.py) on NVIDIA GPUs: a Pallas kernel, by way of Triton,
that takes states from the slots where they lie and leaves them there, as flash-linear-attention's does for one text
(github.com/fla-org/flash-linear-attention, ops/gated_delta_rule/fused_recurrent.py).

A decode step moves hardly anything else: 2 MiB a layer and request of Qwen 3.5 9B. The kernel reads and writes each
state once, where XLA gathers the rows' states, reads those for what they hold and once more for what they become, and
scatters an array of new ones: three times read and twice written."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

NUMBERS = 4096  # of a state in a program: 32 a thread, all of which are read before the first is needed


def pallas(
    q, k, v, log_decay, beta, held, text, slot, takes_back: bool = True, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """As `gated_delta.one_token`, but that `held` float32 [S, N, H, V] has the states of all slots, and `slot` int32
    [B] says which is a row's: returns (out [B, 1, N, V], the states of all slots, in place). Rows that share a slot
    (padding) leave one of theirs there. `interpret` runs it anywhere, slowly."""
    B, _, N, V = v.shape
    group, H = N // k.shape[2], k.shape[3]
    columns = columns_of(H, V)
    kernel = functools.partial(_kernel, group, columns, takes_back)
    made = jax.ShapeDtypeStruct((B, N, V), v.dtype), jax.ShapeDtypeStruct(held.shape, held.dtype)
    how = {"grid": (B, N, V // columns), "compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    call = pl.pallas_call(kernel, made, input_output_aliases={7: 1}, interpret=interpret, name="delta_step", **how)
    out, held = call(slot, text[:, 0], *(a[:, 0] for a in (q, k, v, log_decay, beta)), held)
    return out[:, None], held


def fits(k: jax.Array, held: jax.Array) -> bool:
    """Whether there is a kernel for one token of each row and these states."""
    return k.shape[1] == 1 and has_tiles(held)


def has_tiles(states: jax.Array) -> bool:
    """Whether states [..., H, V] are whole tiles of a power of two."""
    return states.shape[-2] in (16, 32, 64, 128, 256)


def columns_of(H: int, V: int) -> int:
    """Of a state, how many columns, which do not need each other, are a program's: a power of two that divides V."""
    return min(V & -V, max(16, NUMBERS // H))


def _kernel(group, width, takes_back, slot, text, q, k, v, log_decay, beta, held, out, new):
    row, head, columns = pl.program_id(0), pl.program_id(1), pl.ds(pl.program_id(2) * width, width)
    place = slot[row]
    state = held[place, head, :, columns]  # [H, columns]
    q, k = (a[row, head // group].astype(jnp.float32) for a in (q, k))
    rate = log_decay[row, head]  # of all of a state, or of each row of it
    kept = jnp.where(text[row] == 0, jnp.exp(rate), 0.0)
    state *= kept if rate.ndim == 0 else kept[:, None]
    change = v[row, head, columns].astype(jnp.float32)
    if takes_back:
        change -= jnp.sum(state * k[:, None], axis=0)
    change *= beta[row, head]
    state += k[:, None] * change[None]
    new[place, head, :, columns] = state
    out[row, head, columns] = jnp.sum(state * q[:, None], axis=0).astype(out.dtype)
