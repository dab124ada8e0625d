"""Matmul of rows by the weight of their group, without computing any row with another group's: the reference, a blocked
loop for CPUs, tokamax's kernels for GPUs, and the choice. Which rows make a group is expert_dispatch.py's.

`jax.lax.ragged_dot` is not among them: it lowers to a matmul of every row by every group's weight on a GPU (16 times
the flops at 16 experts, compiled), and takes 14 to 163 times a plain matmul on a CPU (measured).
"""

import functools
import importlib.metadata
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from absl import flags, logging

from shardlm.errors import ShardlmError
from shardlm.ops.or_zero import or_zero

GroupedMatmul = Literal["reference", "blocked", "tokamax"]
PART = 1 << 17  # numbers of a weight that a CPU multiplies at a time, and its cache holds for further rows
TOKAMAX_END = (0, 0, 15)  # whose Triton kernels need jax_triton, which compiles for the GPU that is there alone


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: GroupedMatmul = "blocked"
) -> jax.Array:
    """Each row times the weight of its group: y[i] = x[i] @ w[g] for the group g that row i lies in.

    x [n, D] with the rows of group 0 first, then those of group 1, ...; w [G, D, F] in x's dtype; group_sizes int32
    [G], of sum n or less. Returns [n, F] in x's dtype; rows beyond the sum are zero, and so are their gradients. Sums
    are in float32. The arrays of one device: inside shard_map where a mesh splits them. Raises ShardlmError for an
    unknown implementation.
    """
    if implementation not in get_args(GroupedMatmul):
        raise ShardlmError(
            f"unknown grouped matmul {implementation!r}; choose from {', '.join(get_args(GroupedMatmul))}"
        )
    if implementation == "reference":
        return reference(x, w, group_sizes)
    return _grouped(implementation, x, w, group_sizes)


def rows_back(dy: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: GroupedMatmul) -> jax.Array:
    """The gradient [n, D] of the rows, from that of the results [n, F]; the rest as for `grouped_matmul`."""
    if implementation == "reference":
        return reference(dy, w.mT, group_sizes)
    return _ROWS[implementation](dy, w, group_sizes, True)


def reference(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Every row times every weight, of which its group's is kept. Shapes as in `grouped_matmul`."""
    ends = jnp.cumsum(group_sizes)
    group = jnp.sum(jnp.arange(x.shape[0])[:, None] >= ends, axis=1)  # [n], G beyond the last
    mine = (group[:, None] == jnp.arange(w.shape[0])).astype(x.dtype)
    return jnp.einsum("nd,gdf,ng->nf", x, w, mine, preferred_element_type=jnp.float32).astype(x.dtype)


def choose(platform: str) -> GroupedMatmul:
    """The implementation for a platform. Raises ShardlmError for a GPU without the tokamax package, or with one that is
    too new."""
    if platform not in ("gpu", "cuda"):
        chosen, why = "blocked", f"platform is {platform}"
    else:
        _check_tokamax()
        chosen, why = "tokamax", "a GPU, and tokamax is installed"
    logging.vlog(1, "grouped matmul: %s, because %s", chosen, why)
    return chosen


def _check_tokamax() -> None:
    try:
        version = importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        fault = "is not installed"
    else:
        if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < TOKAMAX_END:
            return
        fault = f"is {version}: below {'.'.join(map(str, TOKAMAX_END))} is needed"
    raise ShardlmError(
        f"a mixture of experts on a GPU multiplies by tokamax's kernels, and the package {fault}; "
        "pip install 'shardlm[experts]'"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(implementation, x, w, group_sizes):
    return _ROWS[implementation](x, w, group_sizes, False)


def _forward(implementation, x, w, group_sizes):
    return _grouped(implementation, x, w, group_sizes), (x, w, group_sizes)


def _backward(implementation, kept, dy):
    x, w, group_sizes = kept
    dx = _ROWS[implementation](dy, w, group_sizes, True)
    return dx, _WEIGHTS[implementation](x, dy, group_sizes), None


_grouped.defvjp(_forward, _backward)


# On a CPU: groups in turn, and the rows of one in blocks.


def _blocked_rows(x, w, group_sizes, transposed: bool):
    """x [n, D] @ w[g] [D, F], or w[g] [F, D] transposed, by parts of the weights of groups that have rows: scanned
    over, all of them were copied. 32 weights of [1024, 2048], ms of one core (Intel Xeon): 4 rows of as many groups
    31.9 so and 1.8 now, 32 rows 48.9 and 22, 1,024 rows 135 and 86."""
    (n, width), (G, first, second) = x.shape, w.shape
    block, size = block_rows(n, G), divisor(first, max(1, PART // second))
    padded = jnp.pad(x, ((0, block), (0, 0))).astype(jnp.float32)
    weights = w.reshape(G * first, second)
    if w.dtype == jnp.bfloat16:  # by its bits, though they are copied: XLA makes float32 of all of it (118 ms, 67 so)
        weights = jax.lax.bitcast_convert_type(weights, jnp.uint16)
    starts, with_rows = jnp.cumsum(group_sizes) - group_sizes, jnp.argsort(group_sizes == 0, stable=True)

    def group(i, y):
        g = with_rows[i]

        def part(p, y):
            weight = _float32(jax.lax.dynamic_slice_in_dim(weights, g * first + p * size, size))

            def rows(i, y):
                at, column = starts[g] + i * block, p * size if transposed else 0
                here = (at, 0) if transposed else (at, p * size)
                mine = (jnp.arange(block) < group_sizes[g] - i * block)[:, None]
                own = jax.lax.dynamic_slice(padded, here, (block, width if transposed else size))
                made = jnp.where(mine, own @ (weight.T if transposed else weight), 0)
                made += jax.lax.dynamic_slice(y, (at, column), made.shape)
                return jax.lax.dynamic_update_slice(y, made, (at, column))

            return jax.lax.fori_loop(0, (group_sizes[g] + block - 1) // block, rows, y)

        return jax.lax.fori_loop(0, first // size, part, y)

    zeros = jnp.zeros((n + block, first if transposed else second))
    y = jax.lax.fori_loop(0, jnp.sum(group_sizes > 0), group, zeros)
    return y[:n].astype(x.dtype)


def _float32(a: jax.Array) -> jax.Array:
    """What it is, or as bits of bfloat16 stands for."""
    if a.dtype != jnp.uint16:
        return a.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(a.astype(jnp.uint32) << 16, jnp.float32)


def _blocked_weights(x, dy, group_sizes):
    """[G, D, F] with the sum of x[i] (outer) dy[i] over the rows of each group."""
    block = block_rows(x.shape[0], group_sizes.shape[0])
    x, dy = (jnp.pad(a, ((0, block), (0, 0))) for a in (x, dy))
    starts = jnp.cumsum(group_sizes) - group_sizes

    def group(_, inputs):
        start, size = inputs

        def rows(i, total):
            at = start + i * block
            mine = (jnp.arange(block) < size - i * block)[:, None]
            left = jnp.where(mine, jax.lax.dynamic_slice_in_dim(x, at, block), 0)
            right = jax.lax.dynamic_slice_in_dim(dy, at, block)
            return total + jnp.einsum("nd,nf->df", left, right, preferred_element_type=jnp.float32)

        zero = jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32)
        return None, jax.lax.fori_loop(0, (size + block - 1) // block, rows, zero).astype(x.dtype)

    return jax.lax.scan(group, None, (starts, group_sizes))[1]


def block_rows(rows: int, groups: int) -> int:
    """Rows of one matmul, about half a group's: enough for full speed (from 64 on there is little to gain), few enough
    that the last block of a group is not mostly empty."""
    half = max(1, rows // groups // 2)
    return min(128, 1 << (half - 1).bit_length())


def divisor(of: int, most: int) -> int:
    """The largest divisor of `of` that is at most `most`."""
    return next(n for n in range(min(of, most), 0, -1) if of % n == 0)


# On a GPU: tokamax's Mosaic kernels where it has them for the GPU and the type, else its Triton ones.


def _tokamax_rows(x, w, group_sizes, transposed: bool):
    dims = (((1,), (2 if transposed else 1,)), ((), ()))
    y = _tokamax(x, w, group_sizes, dims, rhs_groups=[0])
    return _only_first(y, jnp.sum(group_sizes))  # the kernels leave the other rows as they find them


def _tokamax_weights(x, dy, group_sizes):
    dw = _tokamax(x, dy, group_sizes, (((0,), (0,)), ((), ())), rhs_groups=[])
    # tokamax 0.0.12's Triton kernel takes rows of the group before for an empty one (its last, masked block).
    return jnp.where((group_sizes > 0)[:, None, None], dw, 0)


def _tokamax(lhs, rhs, group_sizes, dims, rhs_groups):
    import tokamax  # an optional package, and slow to import

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would take this process's arguments for its own flags
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=tuple(tuple(list(part) for part in pair) for pair in dims),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=rhs_groups,
    )
    return tokamax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        preferred_element_type=lhs.dtype,
        implementation=("mosaic", "triton"),  # never "xla", which is jax.lax.ragged_dot
    )


def _only_first(y: jax.Array, count: jax.Array) -> jax.Array:
    return or_zero(jnp.arange(y.shape[0]) < count, y)


_ROWS = {"blocked": _blocked_rows, "tokamax": _tokamax_rows}
_WEIGHTS = {"blocked": _blocked_weights, "tokamax": _tokamax_weights}
