"""The gated delta rule over rows of tokens (gated_delta_chunks.py): by kernels on NVIDIA GPUs, with gradients and
without, and by XLA's products elsewhere."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import logging

from shardlm.ops.summed_rows import gradients_of_whole_chunks, of_whole_chunks

Rule = Callable[..., tuple[jax.Array, jax.Array]]


def by_rows(
    rule: Rule, chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, *rest
) -> tuple[jax.Array, jax.Array]:
    """`rule(q, ...)`, which is gated_delta.gated_delta in chunks of so many tokens; on NVIDIA GPUs by kernels where
    they fit."""
    from shardlm.ops import gated_delta_kernel  # Pallas takes a while to import

    by_channel = log_decay.ndim == 4
    if by_channel or not gated_delta_kernel.fits(q, v, chunk):
        what = "gated delta rule in chunks of %d%s: XLA's products, for %s of %s"
        logging.vlog(1, what, chunk, ", by channel" if by_channel else "", v.dtype, v.shape)
        return rule(q, k, v, log_decay, *rest)
    return delta_rows(rule, chunk, q, k, v, log_decay, *rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def delta_rows(
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
    """As `by_rows`, of arrays that the kernels fit. For gradients kernels keep, beside the arguments,
    gated_delta_kernel.Kept: of a chunk of 64 tokens and a head [128, 128] 56 KiB, where XLA's products keep 48 and what
    they read, cut into chunks (64 of queries, keys and values). To make it again would take the two kernels of the
    forward pass that move 152 of its 232 KiB; and where layers are made again for their gradients it is there
    anyway."""
    kernel = functools.partial(outputs_by_kernel, chunk)
    return jax.lax.platform_dependent(q, k, v, log_decay, beta, state, text, cuda=kernel, default=rule)


def _forward(rule, chunk, *given):
    kernel = functools.partial(kept_outputs_by_kernel, chunk)

    def default(*given):
        *_, kept = jax.eval_shape(kernel, *given)
        return *rule(*given), jax.tree.map(jnp.zeros_like, kept)  # which `_backward` does not read there

    *found, kept = jax.lax.platform_dependent(*given, cuda=kernel, default=default)
    return tuple(found), (given, kept)


def _backward(rule, chunk, held, asked):
    given, kept = held

    def default(kept, *both):
        *given, text, d_out, d_state = both
        return jax.vjp(lambda *a: rule(*a, text), *given)[1]((d_out, d_state))

    kernel = functools.partial(gradients_by_kernel, chunk)
    return (*jax.lax.platform_dependent(kept, *given, *asked, cuda=kernel, default=default), None)


delta_rows.defvjp(_forward, _backward)


def outputs_by_kernel(chunk: int, *given, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `delta_rows`."""
    from shardlm.ops import gated_delta_kernel

    return of_whole_chunks(gated_delta_kernel.outputs, chunk, *given, interpret)


def kept_outputs_by_kernel(chunk: int, *given, interpret: bool = False):
    """As `delta_rows`, and gated_delta_kernel.Kept."""
    from shardlm.ops import gated_delta_kernel

    return of_whole_chunks(gated_delta_kernel.kept_outputs, chunk, *given, interpret)


def gradients_by_kernel(chunk: int, kept, *given, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Of the first six arguments of `delta_rows`, for those of outputs and of the state, the last two."""
    from shardlm.ops import gated_delta_back_kernel

    gradients = functools.partial(gated_delta_back_kernel.gradients, kept)
    return gradients_of_whole_chunks(gradients, chunk, *given, interpret)
