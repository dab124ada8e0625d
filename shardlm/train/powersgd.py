"""PowerSGD (https://arxiv.org/abs/1905.13727): the sum over replicas of a matrix as the product of two thin ones, by
one power iteration from where the last exchange ended. Which dimensions are a matrix's rows and columns is read from
their names; stacked layers and experts are compressed one by one."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlm.mesh import shard_map

Names = tuple[tuple[str, ...], tuple[str, ...]]
_EPS = 1e-30  # far below any gradient: only keeps a zero column from dividing by zero


def split(names: Names) -> tuple[int, int]:
    """(number of leading dimensions that count matrices, number of those and the rows together). Columns are the rest;
    none where the array is not a matrix."""
    stack, own = names
    batch = len(stack) + (own[0] == "experts")
    first, dims = own[batch - len(stack)], len(stack) + len(own)
    if dims - batch < 2:
        return batch, dims
    return batch, batch + 1 if first.endswith("embed") else dims - 1


def thin(shape: tuple[int, ...], names: Names, rank: int) -> tuple[int, int, int]:
    """(rows, columns, rank) of each matrix; the rank at most the smaller side."""
    batch, rows = split(names)
    n, m = math.prod(shape[batch:rows]), math.prod(shape[rows:])
    return n, m, min(rank, n, m)


def pays(shape: tuple[int, ...], names: Names, rank: int) -> bool:
    """Whether an array is a matrix that its factors are smaller than."""
    n, m, r = thin(shape, names, rank)
    return split(names)[1] < len(shape) and r * (n + m) < n * m


def numbers_sent(a: jax.ShapeDtypeStruct, names: Names, rank: int) -> int:
    """Numbers in one device's part of both factors."""
    batch, rows = split(names)
    local = a.sharding.shard_shape(a.shape)
    r = thin(a.shape, names, rank)[2]
    return math.prod(local[:batch]) * r * (math.prod(local[batch:rows]) + math.prod(local[rows:]))


def first_basis(a: jax.Array, names: Names, rank: int) -> jax.Array:
    """Right factors [matrices..., columns..., r] to start from: normal numbers, the same on every replica."""
    batch, rows = split(names)
    shape = (*a.shape[:batch], *a.shape[rows:], thin(a.shape, names, rank)[2])
    return jax.random.normal(jax.random.key(rank), shape, jnp.float32, out_sharding=_specs(a, names)[1])


def low_rank_sum(m: jax.Array, basis: jax.Array, names: Names) -> tuple[jax.Array, jax.Array, jax.Array]:
    """About the sum over `data` of m, what of m this replica did not send, and the next basis (algorithm 1 there).

    m [matrices..., rows..., columns...] float32, basis [matrices..., columns..., r]. The approximation is the sum
    projected on the span of its products with the basis: exact where the rank of the sum is at most r.
    """
    batch, rows = split(names)
    left_spec, right_spec, whole = _specs(m, names)
    b, i, j = "abc"[:batch], "ijk"[: rows - batch], "uvw"[: m.ndim - rows]
    products = f"{b}{i}{j},{b}{j}r->{b}{i}r", f"{b}{i}{j},{b}{i}r->{b}{j}r", f"{b}{i}r,{b}{j}r->{b}{i}{j}"
    times, transposed, together = (_einsum(letters) for letters in products)
    left = exact_sum(times(m, basis, left_spec))
    left = jax.reshard(orthonormal(jax.reshard(left, PartitionSpec(*whole[:batch])), batch), left_spec)
    right = transposed(m, left, right_spec)
    residual = m - together(left, right, whole)
    basis = exact_sum(right)
    return together(left, basis, whole), residual, basis


def exact_sum(x: jax.Array) -> jax.Array:
    """Sum over `data`, of each device's own part of x: in the open, XLA may gather x within a replica first and send
    the whole of it from every device."""
    spec = jax.typeof(x).sharding.spec
    return shard_map(lambda a: jax.lax.psum(a, "data"), in_specs=spec, out_specs=spec)(x)


def orthonormal(p: jax.Array, batch: int) -> jax.Array:
    """Gram-Schmidt over the last dimension of p [matrices..., rows..., r], twice over for float32's sake."""
    shape, r = p.shape, p.shape[-1]
    p = p.reshape(*shape[:batch], -1, r)

    def column(k, p):
        v, before = p[..., k], p * (jnp.arange(r) < k)
        for _ in range(2):
            along = jnp.einsum("...nr,...n->...r", before, v, precision="highest")
            v = v - jnp.einsum("...nr,...r->...n", before, along, precision="highest")
        v = v / jnp.maximum(jnp.linalg.norm(v, axis=-1, keepdims=True), _EPS)
        return jnp.where(jnp.arange(r) == k, v[..., None], p)

    return jax.lax.fori_loop(0, r, column, p).reshape(shape)


def _specs(a: jax.Array, names: Names) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Where the left factor, the right factor and the array itself are split."""
    batch, rows = split(names)
    spec = jax.typeof(a).sharding.spec
    parts = (*spec, *[None] * (a.ndim - len(spec)))
    return (
        PartitionSpec(*parts[:rows], None),
        PartitionSpec(*parts[:batch], *parts[rows:], None),
        PartitionSpec(*parts),
    )


def _einsum(letters: str):
    return lambda x, y, spec: jnp.einsum(letters, x, y, out_sharding=spec, precision="highest")
