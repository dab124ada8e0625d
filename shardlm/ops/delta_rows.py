"""Rows of texts that go on from what is remembered of them in slots, and leave there what is remembered then: by linear
attention (gated_delta.py), as the programs of a server want it."""

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from shardlm.ops.delta_drafts import delta_net_of_drafts
from shardlm.ops.gated_delta import Memory, delta_net, one_token

Rows = Literal["known", "drafts", "in_turn"]
"""known    rows of tokens that stay, each of another text
drafts   tokens may turn out wrong from a place in the text on (delta_drafts.py)
in_turn  rows of one token, of which several may be of one text, those before the others that come first there: each
         goes through the same program of one row, so that its bits are the same wherever it stands
"""


def remembered(
    rows: Rows,
    x: dict[str, jax.Array],
    taps: dict[str, jax.Array],
    log_decay: jax.Array,
    beta: jax.Array,
    sure: jax.Array,
    position: jax.Array,
    valid: jax.Array,
    held: Memory,
    slot: jax.Array,
) -> tuple[jax.Array, Memory]:
    """As gated_delta.delta_net, of rows whose first tokens stand at `position` int32 [B] of their texts; `held` is the
    memory of all slots [S, ...], and slot int32 [B] each row's. Of drafts those before `sure` int32 [B] are right.
    Returns (the output, the memory of all slots)."""
    given = (x, taps, log_decay, beta, position, valid, held, slot)
    if rows == "in_turn":
        return _in_turn(*given)
    if rows == "drafts":
        return _drafts(sure, *given)
    return _known(*given)


def _known(*given) -> tuple[jax.Array, Memory]:
    """Of one token each by a kernel on NVIDIA GPUs."""
    from shardlm.ops import delta_step_kernel  # Pallas takes a while to import

    (x, *_, held, _), here = given, functools.partial(_at_once, delta_net_of_known)
    if not delta_step_kernel.fits(x["k"], held["state"]):
        return here(*given)
    kernel = functools.partial(known_in_place, delta_step_kernel.pallas)
    return jax.lax.platform_dependent(*given, cuda=kernel, default=here)


def _drafts(*given) -> tuple[jax.Array, Memory]:
    """By a kernel on NVIDIA GPUs, if they are few."""
    from shardlm.ops import delta_drafts_kernel  # Pallas takes a while to import

    (_, x, *_, held, _), here = given, functools.partial(drafts_in_place, None)
    if not delta_drafts_kernel.fits(held["beta"].shape[1] + x["k"].shape[1], held["state"]):
        return here(*given)
    kernel = functools.partial(drafts_in_place, delta_drafts_kernel.pallas)
    return jax.lax.platform_dependent(*given, cuda=kernel, default=here)


def known_in_place(rule: Callable, *given) -> tuple[jax.Array, Memory]:
    """Known rows, by a rule that takes states from their slots and leaves them there (delta_step_kernel.py)."""
    run = functools.partial(delta_net_of_known, rule=functools.partial(rule, slot=given[-1]))
    return _at_once(run, *given, whole=("state",))


def drafts_in_place(through: Callable | None, sure, *given) -> tuple[jax.Array, Memory]:
    """Drafts, by what takes states from their slots and leaves them there (delta_drafts_kernel.py), if anything."""
    through = through and functools.partial(through, slot=given[-1])

    def run(x, taps, log_decay, beta, memory, position, valid):
        return delta_net_of_drafts(x, taps, log_decay, beta, memory, sure, position, valid, through)

    return _at_once(run, *given, whole=("state",) if through else ())


def _at_once(
    run, x, taps, log_decay, beta, position, valid, held: Memory, slot, whole: tuple[str, ...] = ()
) -> tuple[jax.Array, Memory]:
    """Of what is remembered `run` has the rows' parts and gives them back; of what is named in `whole`, all slots'."""
    memory = {n: a if n in whole else a.at[slot].get(mode="promise_in_bounds") for n, a in held.items()}
    out, memory = run(x, taps, log_decay, beta, memory, position, valid)
    put = {n: a if n in whole else held[n].at[slot].set(a, mode="promise_in_bounds") for n, a in memory.items()}
    return out, held | put


def _in_turn(x, taps, log_decay, beta, position, valid, held: Memory, slot) -> tuple[jax.Array, Memory]:
    """Up to the last row that has a token, 18 small kernels each (compiled for an H100): about 1 ms for a token of Qwen
    3.5 9B's 24 such layers (estimated). The state is multiplied as it lies: with a sum in its place XLA turned the
    memory of all slots before the loop, and back behind it."""
    run = functools.partial(delta_net_of_known, rule=functools.partial(one_token, product=True))

    def one(i, carry):
        out, held = carry
        own = lambda tree: jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i, 1), tree)  # noqa: E731
        given = (taps, *own((log_decay, beta, position, valid)), held, own(slot))
        new, held = _at_once(run, own(x), *given)
        return jax.lax.dynamic_update_slice_in_dim(out, new, i, 0), held

    count = jnp.max(jnp.where(valid[:, 0], jnp.arange(len(valid)) + 1, 0))
    return jax.lax.fori_loop(0, count, one, (jnp.zeros_like(x["v"]), held))


def delta_net_of_known(
    x: dict[str, jax.Array],
    taps: dict[str, jax.Array],
    log_decay: jax.Array,
    beta: jax.Array,
    memory: Memory,
    position: jax.Array,
    valid: jax.Array,
    rule: Callable | None = None,
) -> tuple[jax.Array, Memory]:
    """As gated_delta.delta_net, of rows of tokens that stay, the first at `position` int32 [B]: a text begins at 0, any
    other goes on from a memory behind which no tokens are that may be wrong. Returns the output, and what has changed
    of the memory, with room for such tokens or without."""
    new = (position[:, None] == 0) & valid & (jnp.arange(valid.shape[1]) == 0)
    names, before = [f"conv_{name}" for name in x], taps["q"].shape[-1] - 1
    known = {"state": memory["state"]} | {name: memory[name][:, :before] for name in names}
    out, known = delta_net(x, taps, log_decay, beta, known, new, valid, rule)
    if "start" not in memory:
        return out, known
    known |= {name: jnp.concatenate([known[name], memory[name][:, before:]], axis=1) for name in names}
    end = position + jnp.sum(valid, axis=1, dtype=jnp.int32)
    return out, known | {"start": jnp.where(valid[:, 0], end, memory["start"])}
