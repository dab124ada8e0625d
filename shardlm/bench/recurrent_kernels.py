"""Linear attention beside its reference, for kernels.py: tokens that are served, one of each row after the other from
the slots where rows are remembered, and whole rows in chunks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.bench.kernel_cases import Recurrent
from shardlm.ops import delta_step_kernel
from shardlm.ops.delta_rows import in_place
from shardlm.ops.gated_delta import delta_net, empty_memory, gated_delta, reference

WIDTH = 4  # of convolutions


def inputs_of(s: Recurrent) -> Callable[[jax.Array], tuple]:
    """key -> (x of all tokens, taps, log_decay, beta) and, of what is served, the memory of all slots."""
    of = {"q": (s.kv_heads, s.width), "k": (s.kv_heads, s.width), "v": (s.heads, s.width)}

    def inputs(key: jax.Array) -> tuple:
        keys = iter(jax.random.split(key, 9))
        of_tokens = lambda *own: (s.rows, s.tokens, *own)  # noqa: E731
        x = {name: jax.random.normal(next(keys), of_tokens(*own), jnp.bfloat16) for name, own in of.items()}
        taps = {name: jax.random.normal(next(keys), (*own, WIDTH), jnp.bfloat16) / 2 for name, own in of.items()}
        rates = of_tokens(s.heads, s.width) if s.by_channel else of_tokens(s.heads)
        log_decay = -jax.random.uniform(next(keys), rates, maxval=0.1)
        beta = jax.random.uniform(next(keys), of_tokens(s.heads))
        held = empty_memory(x, WIDTH)  # as many slots as rows
        held["state"] = jax.random.normal(next(keys), held["state"].shape)
        return (x, taps, log_decay, beta, held) if s.served else (x, taps, log_decay, beta)

    return inputs


def served(s: Recurrent, on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(as programs of a server do it, plainly): inputs -> (the outputs of all tokens, the memory of all slots)."""
    rule = delta_step_kernel.pallas if on_gpu else _interpreted
    slots = lambda: jnp.arange(s.rows)[::-1]  # noqa: E731

    def run(x, taps, log_decay, beta, held):
        slot, valid = slots(), jnp.ones((s.rows, 1), bool)

        def token(i, carry):
            out, held = carry
            one = lambda a: jax.lax.dynamic_slice_in_dim(a, i, 1, axis=1)  # noqa: E731
            position = jnp.full(s.rows, 1 + i, jnp.int32)
            given = ({name: one(a) for name, a in x.items()}, taps, one(log_decay), one(beta), position, valid)
            made, held = in_place(rule, *given, held, slot)
            return jax.lax.dynamic_update_slice_in_dim(out, made, i, axis=1), held

        return jax.lax.fori_loop(0, s.tokens, token, (jnp.zeros_like(x["v"]), held))

    def plain(x, taps, log_decay, beta, held):
        slot = slots()
        old, whole = jax.tree.map(lambda a: a[slot], held), jnp.ones((s.rows, s.tokens), bool)
        out, new = delta_net(x, taps, log_decay, beta, old, jnp.zeros_like(whole), whole, reference)
        return out, {name: a[slot] for name, a in new.items()}

    return run, plain


def _interpreted(*given, slot):
    return delta_step_kernel.pallas(*given, slot, interpret=True)


def in_chunks(s: Recurrent) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(in chunks, token by token) of rows that begin: inputs -> (outputs, memory)."""

    def by(rule: Callable) -> Callable:
        def run(x, taps, log_decay, beta):
            new = jnp.broadcast_to(jnp.arange(s.tokens) == 0, (s.rows, s.tokens))
            memory = empty_memory(x, WIDTH)
            return delta_net(x, taps, log_decay, beta, memory, new, jnp.ones_like(new), rule)

        return run

    return by(gated_delta), by(reference)


def least(s: Recurrent) -> tuple[float, float]:
    """(FLOPs, bytes) that the rule asks for: a state decays, is read by a key and a query, and changes; it is read and
    written for each token that is served, and written once of a whole row."""
    states = s.rows * s.heads * s.width**2
    tokens = s.rows * s.tokens * (2 * s.kv_heads + 2 * s.heads) * s.width * 2  # in bfloat16, outputs too
    passes = 2 * s.tokens if s.served else 1
    return 7.0 * states * s.tokens, 4.0 * states * passes + tokens
