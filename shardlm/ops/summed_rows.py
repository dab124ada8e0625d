"""Mamba 2's rule over rows of tokens (summed_states.py), with a gradient of its own: by kernels on NVIDIA GPUs, and by
XLA elsewhere."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.ops.gated_delta_chunks import sums_of
from shardlm.ops.short_conv import last_before

Rule = Callable[..., tuple[jax.Array, jax.Array]]


def by_rows(rule: Rule, chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, *rest) -> tuple[jax.Array, jax.Array]:
    """`rule(q, ...)`, which is gated_delta.gated_delta that takes nothing back in chunks of so many tokens; on NVIDIA
    GPUs by kernels where they fit."""
    from shardlm.ops import summed_kernel  # Pallas takes a while to import

    if not summed_kernel.fits(q, v, chunk):
        logging.vlog(1, "Mamba 2 in chunks of %d: XLA's products, for %s of %s", chunk, v.dtype, v.shape)
        return rule(q, k, v, *rest)
    return summed_rows(rule, chunk, q, k, v, *rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def summed_rows(
    rule: Rule,
    chunk: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    text: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """As `by_rows`, of arrays that the kernels fit. Kept for the gradient are the arguments."""
    kernel = functools.partial(outputs_by_kernel, chunk)
    return jax.lax.platform_dependent(q, k, v, log_decay, beta, state, text, cuda=kernel, default=rule)


def _forward(rule, chunk, *given):
    return summed_rows(rule, chunk, *given), given


def _backward(rule, chunk, given, asked):
    def default(*both):
        *given, text, d_out, d_state = both
        return jax.vjp(lambda *a: rule(*a, text), *given)[1]((d_out, d_state))

    kernel = functools.partial(gradients_by_kernel, chunk)
    return (*jax.lax.platform_dependent(*given, *asked, cuda=kernel, default=default), None)


summed_rows.defvjp(_forward, _backward)


def outputs_by_kernel(chunk: int, *given, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `summed_rows`."""
    from shardlm.ops import summed_kernel

    return of_whole_chunks(summed_kernel.outputs, chunk, *given, interpret)


def of_whole_chunks(outputs: Callable, chunk: int, q, k, v, log_decay, beta, state, text, interpret: bool):
    """As `summed_rows`, by kernels `outputs(q, k, v, rates, state, interpret)` of whole chunks; and what these return
    besides."""
    T = q.shape[1]
    q, k, v, log_decay, beta, text = (whole_chunks(a, chunk) for a in (q, k, v, log_decay, beta, text))
    out, *others = outputs(q, k, v, rates_of(chunk, log_decay, beta, text), state, interpret)
    return out[:, :T], *others


def gradients_by_kernel(chunk: int, *given, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Of the first six arguments of `summed_rows`, for those of outputs and of the state, the last two."""
    from shardlm.ops import summed_back_kernel

    return gradients_of_whole_chunks(summed_back_kernel.gradients, chunk, *given, interpret)


def gradients_of_whole_chunks(
    gradients: Callable, chunk: int, q, k, v, log_decay, beta, state, text, d_out, d_state, interpret: bool
) -> tuple[jax.Array, ...]:
    """As `gradients_by_kernel`, by kernels `gradients(q, k, v, rates, state, d_out, d_state, interpret)` of whole
    chunks, which return summed_back_kernel.Gradients."""
    T = q.shape[1]
    q, k, v, log_decay, beta, text, d_out = (whole_chunks(a, chunk) for a in (q, k, v, log_decay, beta, text, d_out))
    found = gradients(q, k, v, rates_of(chunk, log_decay, beta, text), state, d_out, d_state, interpret)
    cut = lambda a: a.reshape(*a.shape[:2], -1, chunk)  # noqa: E731
    d_decay = jnp.cumsum(cut(found.sums)[..., ::-1], axis=-1)[..., ::-1] + found.last[..., None]
    tokens = (jnp.moveaxis(a.reshape(found.beta.shape), 2, 1) for a in (d_decay, found.beta))
    return *(a[:, :T] for a in (found.q, found.k, found.v, *tokens)), found.state


def rates_of(chunk: int, log_decay: jax.Array, beta: jax.Array, text: jax.Array):
    """summed_kernel.Rates of log_decay and beta [B, T, N] and text [B, T]."""
    from shardlm.ops import summed_kernel

    B, T, N = beta.shape
    cut = lambda a: jnp.moveaxis(a, 1, 2).reshape(B, N, T // chunk, chunk)  # noqa: E731
    steps, rest = sums_of(cut(log_decay))
    of = text.reshape(B, 1, T // chunk, chunk)
    held = of == last_before(text, chunk)[:, None, :, None]
    h = jnp.where(held, jnp.exp(steps + rest), 0.0)
    behind = (steps[..., -1:] - steps) + (rest[..., -1:] - rest)
    e = jnp.where(of == of[..., -1:], jnp.exp(behind), 0.0)
    flat = (a.reshape(B, N, T) for a in (steps, rest, h, e, cut(beta)))
    return summed_kernel.Rates(*flat, left=h[..., -1], text=text)


def whole_chunks(a: jax.Array, chunk: int) -> jax.Array:
    """With tokens that are no one's behind the last, up to whole chunks."""
    behind = -a.shape[1] % chunk
    mode = "edge" if jnp.issubdtype(a.dtype, jnp.integer) else "constant"
    return jnp.pad(a, ((0, 0), (0, behind)) + ((0, 0),) * (a.ndim - 2), mode=mode) if behind else a
