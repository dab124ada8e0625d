"""Products with frozen weights in few bits, whose numbers are made anew in the compute dtype for the backward pass as
for the forward one: whatever a remat policy keeps, nothing of the size of a weight is. Kept as layers use them, the
weights of Llama 3 8B were 13 GiB beside the 3.7 of int4 (remat=none, compiled)."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.ops import grouped_matmul
from shardlm.ops.grouped_weights import Grouped, Groups, dequantised


def anew_einsum(
    letters: str, x: jax.Array, held: Grouped, axis: int, groups: Groups, out_sharding: PartitionSpec | None = None
) -> jax.Array:
    """einsum(letters, x, w) in x's dtype by a weight [*summed, *made] that is held in groups along `axis`, which each
    device has whole groups of. `out_sharding` as for jnp.einsum. The weight has no gradient."""
    return _einsum(letters, jax.typeof(x), axis, groups, out_sharding, x, held)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4))
def _einsum(*arguments):
    return _einsum_forward(*arguments)[0]


# Not by way of `_einsum`, inside of which a remat policy sees no product.
def _einsum_forward(letters, of_x, axis, groups, out_sharding, x, held):
    return jnp.einsum(letters, x, dequantised(held, axis, groups, x.dtype), out_sharding=out_sharding), held


def _einsum_backward(letters, of_x, axis, groups, out_sharding, held, dy):
    w = dequantised(held, axis, groups, of_x.dtype)
    (dx,) = jax.linear_transpose(lambda x: jnp.einsum(letters, x, w, out_sharding=out_sharding), of_x)(dy)
    return dx, None


_einsum.defvjp(_einsum_forward, _einsum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def anew_experts(groups: Groups, implementation: str, x: jax.Array, held: Grouped, group_sizes: jax.Array) -> jax.Array:
    """Each row of x [n, K] by the weight of its expert, of [E, K, F] held in groups along K: as grouped_matmul.py's
    grouped_matmul, on one device's arrays. The weights have no gradient."""
    return _experts_forward(groups, implementation, x, held, group_sizes)[0]


def _experts_forward(groups, implementation, x, held, group_sizes):
    w = dequantised(held, 1, groups, x.dtype)
    y = grouped_matmul.grouped_matmul(x, w, group_sizes, implementation=implementation)
    return y, (held, group_sizes)


def _experts_backward(groups, implementation, kept, dy):
    held, group_sizes = kept
    w = dequantised(held, 1, groups, dy.dtype)
    return grouped_matmul.rows_back(dy, w, group_sizes, implementation=implementation), None, None


anew_experts.defvjp(_experts_forward, _experts_backward)
