"""Inverses of many small triangular matrices at once, of which linear attention has one for each chunk and head
(gated_delta_chunks.py)."""

import math

import jax
import jax.numpy as jnp

WHOLE = 16  # rows of blocks that are inverted as whole matrices: products of smaller blocks would be too many


def inverse_of_unit(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of matrices [..., C, C] that are 0 on and above the diagonal, C a power of two: of each pair of
    blocks [[P, 0], [R, Q]] that are inverted already it is [[P', 0], [-Q' R P', Q']], as substitution has it; the sum
    of lower's powers would lose digits. float32; not to be differentiated."""
    C = lower.shape[-1]
    size = min(WHOLE, C)
    inverse = _whole(diagonal(lower, size))  # [..., C / size, size, size]
    while size < C:
        P, Q = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        R = diagonal(lower, 2 * size)[..., size:, :size]
        corner = -_exact(_exact(Q, R), P)
        above = jnp.concatenate([P, jnp.zeros_like(P)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, Q], axis=-1)], axis=-2)
        size *= 2
    return inverse[..., 0, :, :]


def diagonal(a: jax.Array, size: int) -> jax.Array:
    """[..., C, C] -> its blocks on the diagonal [..., C / size, size, size]."""
    blocks = [a[..., at : at + size, at : at + size] for at in range(0, a.shape[-1], size)]
    return jnp.stack(blocks, axis=-3)


def _whole(lower: jax.Array) -> jax.Array:
    """The same of small matrices, in which blocks of all sizes are products of whole matrices."""
    C = lower.shape[-1]
    index = jnp.arange(C)
    inverse = jnp.eye(C, dtype=lower.dtype)
    for level in range(int(math.log2(C))):
        row, column = index[:, None] >> level, index[None] >> level
        between = jnp.where((row % 2 == 1) & (column == row - 1), lower, 0.0)
        if level:
            between = _exact(_exact(inverse, between), inverse)
        inverse = inverse - between
    return inverse


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
