"""Linear attention beside its reference, for kernels.py: tokens that are served, one of each row after the other from
the slots where rows are remembered, and whole rows in chunks."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardlm.bench.kernel_cases import Recurrent
from shardlm.ops import delta_drafts_kernel, delta_step_kernel
from shardlm.ops.delta_rows import drafts_in_place, known_in_place
from shardlm.ops.gated_delta import CHUNK, SKIP, SUMMED, delta_net, empty_memory, gated_delta, reference
from shardlm.ops.gated_delta import in_chunks as rows_in_chunks

WIDTH = 4  # of convolutions
KNOWN = ("state", "conv_q", "conv_k", "conv_v")
BEGINS = 1  # the place of the first token of rows that are remembered


def inputs_of(s: Recurrent) -> Callable[[jax.Array], tuple]:
    """key -> (x of all tokens, taps, log_decay, beta) and, of what is served, the memory of all slots; for gradients,
    those of the outputs."""
    of = {"q": (s.kv_heads, s.width), "k": (s.kv_heads, s.width), "v": (s.heads, s.values)}

    def inputs(key: jax.Array) -> tuple:
        keys = iter(jax.random.split(key, 9))
        of_tokens = lambda *own: (s.rows, s.tokens, *own)  # noqa: E731
        x = {name: jax.random.normal(next(keys), of_tokens(*own), jnp.bfloat16) for name, own in of.items()}
        taps = {name: jax.random.normal(next(keys), (*own, WIDTH), jnp.bfloat16) / 2 for name, own in of.items()}
        taps |= {} if s.takes_back else {SKIP: jnp.ones(s.heads, jnp.bfloat16)}
        rates = of_tokens(s.heads, s.width) if s.by_channel else of_tokens(s.heads)
        log_decay = -jax.random.uniform(next(keys), rates, maxval=0.1)
        beta = jax.random.uniform(next(keys), of_tokens(s.heads))
        if s.back:
            return x, taps, log_decay, beta, jax.random.normal(next(keys), x["v"].shape, jnp.bfloat16)
        held = empty_memory(x, WIDTH)  # as many slots as rows
        held["state"] = jax.random.normal(next(keys), held["state"].shape)
        if s.drafts:
            held |= {name: jnp.pad(a, _behind(a, 1 + s.drafts)) for name, a in held.items() if name != "state"}
            held |= {n: jnp.zeros_like(a[:, : 1 + s.drafts]) for n, a in (("log_decay", log_decay), ("beta", beta))}
            held["start"] = jnp.full(s.rows, BEGINS, jnp.int32)
        return (x, taps, log_decay, beta, held) if s.served else (x, taps, log_decay, beta)

    return inputs


def served(s: Recurrent, on_gpu: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(as programs of a server do it, plainly): inputs -> (the outputs of all tokens, the states of all slots). With
    drafts a state stays a step behind: of these the outputs alone."""
    each = 1 + s.drafts
    slots = lambda: jnp.arange(s.rows)[::-1]  # noqa: E731

    def run(x, taps, log_decay, beta, held):
        slot, valid = slots(), jnp.ones((s.rows, each), bool)

        def step(i, carry):
            out, held = carry
            part = lambda a: jax.lax.dynamic_slice_in_dim(a, i * each, each, axis=1)  # noqa: E731
            position = jnp.full(s.rows, BEGINS + i * each, jnp.int32)
            given = ({name: part(a) for name, a in x.items()}, taps, part(log_decay), part(beta), position, valid)
            made, held = _step(s, on_gpu)(position, *given, held, slot)
            return jax.lax.dynamic_update_slice_in_dim(out, made, i * each, axis=1), held

        out, held = jax.lax.fori_loop(0, s.tokens // each, step, (jnp.zeros_like(x["v"]), held))
        return (out,) if s.drafts else (out, held["state"])

    def plain(x, taps, log_decay, beta, held):
        slot, whole = slots(), jnp.ones((s.rows, s.tokens), bool)
        old = {name: a[slot, : WIDTH - 1] if name != "state" else a[slot] for name, a in held.items() if name in KNOWN}
        out, new = delta_net(x, taps, log_decay, beta, old, jnp.zeros_like(whole), whole, reference)
        return (out,) if s.drafts else (out, new["state"][slot])

    return run, plain


def _step(s: Recurrent, on_gpu: bool) -> Callable[..., Any]:
    """(sure, what delta_rows has of known rows) -> (outputs, the memory of all slots)."""
    if s.drafts:
        through = functools.partial(delta_drafts_kernel.pallas, interpret=not on_gpu)
        return functools.partial(drafts_in_place, through)

    def rule(*given, slot, takes_back=True):
        return delta_step_kernel.pallas(*given, slot, takes_back, interpret=not on_gpu)

    return lambda sure, *given: known_in_place(rule, *given)


def _behind(a: jax.Array, more: int) -> list[tuple[int, int]]:
    """So many more places along the second dimension."""
    return [(0, more if axis == 1 else 0) for axis in range(a.ndim)]


def in_chunks(s: Recurrent) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(in chunks, token by token) of rows that begin: inputs -> (outputs, memory), or gradients of inputs."""

    def by(rule: Callable) -> Callable:
        def run(x, taps, log_decay, beta):
            new = jnp.broadcast_to(jnp.arange(s.tokens) == 0, (s.rows, s.tokens))
            memory = empty_memory(x, WIDTH)
            return delta_net(x, taps, log_decay, beta, memory, new, jnp.ones_like(new), rule)

        def back(x, taps, log_decay, beta, d_out):
            out, gradients = jax.vjp(lambda *given: run(*given)[0], x, taps, log_decay, beta)
            return gradients(d_out.astype(out.dtype))

        return back if s.back else run

    return by(_by_xla if s.by_xla else gated_delta), by(reference)


def _by_xla(*given, takes_back: bool = True) -> tuple[jax.Array, jax.Array]:
    """As gated_delta, without kernels but that which carries states."""
    return rows_in_chunks(CHUNK if takes_back else SUMMED, takes_back, *given)


def least(s: Recurrent) -> tuple[float, float]:
    """(FLOPs, bytes) that the rule asks for: a state decays, is read by a key (if the rule takes back) and a query, and
    changes; it is read and written for each token that is served, and written once of a whole row. Of gradients: twice
    the FLOPs beside those of the row, and what tokens have, their own and their gradients."""
    states = s.rows * s.heads * s.width * s.values
    tokens = s.rows * s.tokens * 2 * (s.kv_heads * s.width + s.heads * s.values) * 2  # in bfloat16, outputs too
    passes = 2 * s.tokens / (1 + s.drafts) if s.served else 1
    flops, nbytes = (7.0 if s.takes_back else 5.0) * states * s.tokens, 4.0 * states * passes + tokens
    return (3 * flops, 2 * nbytes) if s.back else (flops, nbytes)
