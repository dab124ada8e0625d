"""The gated delta rule over rows of tokens (gated_delta_chunks.py): by kernels on NVIDIA GPUs where nothing asks for
gradients, as in a server's prompts, and by XLA's products elsewhere."""

import functools
from collections.abc import Callable

import jax
from absl import logging

from shardlm.ops.summed_rows import of_whole_chunks

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
    """As `by_rows`, of arrays that the kernels fit. With gradients it is `rule` and its own."""
    kernel = functools.partial(outputs_by_kernel, chunk)
    return jax.lax.platform_dependent(q, k, v, log_decay, beta, state, text, cuda=kernel, default=rule)


def _forward(rule, chunk, *given):
    *given, text = given
    return jax.vjp(lambda *a: rule(*a, text), *given)


def _backward(rule, chunk, back, asked):
    return (*back(asked), None)


delta_rows.defvjp(_forward, _backward)


def outputs_by_kernel(chunk: int, *given, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """As `delta_rows`."""
    from shardlm.ops import gated_delta_kernel

    return of_whole_chunks(gated_delta_kernel.outputs, chunk, *given, interpret)
