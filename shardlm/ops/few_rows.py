"""Products of few rows with weights in 16 bits, for GPUs: with the norm before them and the gate behind them in one
kernel (few_rows_kernel.py), on the arrays of one device."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlm.ops.swiglu import Activation, activate

MOST = 64  # rows, whose sums fit in registers
TILE = 16  # the fewest rows of a product of the tensor cores
GATES: tuple[Activation, ...] = ("silu", "gelu_tanh", "relu", "relu2")
"""The activations that the kernel has."""
# Of a weight, about three for each of a GPU's multiprocessors, which reads ahead in all of them. Those of a gated pair
# go over all that is summed up, as a gate is of whole sums: with fewer of them each weight has programs of its own.
PROGRAMS, PAIRS = 384, 192
LEAST = 512  # numbers that are worth a part of their own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Norm:
    """Of the rows: by the root of the mean square, and then times scale [K] + offset."""

    scale: jax.Array
    eps: float = dataclasses.field(metadata={"static": True})
    offset: float = dataclasses.field(default=0.0, metadata={"static": True})


class Sizes(NamedTuple):
    """What is known when compiling.

    rows           of x
    summed         numbers in each
    block_columns  of a program, in each weight that it reads
    step           numbers that are summed up at a time
    splits         parts that are summed up apart
    stages         of reading ahead
    """

    rows: int
    summed: int
    block_columns: int
    step: int
    splits: int
    stages: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """A product of rows before it is added up: parts float32 [splits, *rows, ...], and where its rows [*rows, summed]
    have a norm the parts [splits, *rows] of their sum of squares, by whose root, of the mean, it is still to be
    divided. `dtype` is what it is rounded to."""

    parts: jax.Array
    squares: jax.Array | None
    summed: int = dataclasses.field(metadata={"static": True})
    eps: float = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def taken(self) -> jax.Array:
        """The product [*rows, ...]."""
        made = functools.reduce(jnp.add, self.parts)
        if self.squares is not None:
            inverse = jax.lax.rsqrt(functools.reduce(jnp.add, self.squares) / self.summed + self.eps)
            made = made * inverse.reshape(*inverse.shape, *(1,) * (made.ndim - inverse.ndim))
        return made.astype(self.dtype)


def products(
    x: jax.Array, weights: Sequence[jax.Array], norm: Norm | None = None, *, interpret: bool = False
) -> list[jax.Array]:
    """x [M, K], up to MOST rows, or its norm, times each weight [K, F]: [M, F] of each in x's dtype, summed in float32.
    How sums are cut depends on the weights, and of the number of rows only on whether it is more than TILE."""
    parts, squares = in_parts(x, weights, norm, interpret=interpret)
    return [Sums(part, squares, x.shape[1], norm.eps if norm else 0.0, x.dtype).taken for part in parts]


def in_parts(
    x: jax.Array, weights: Sequence[jax.Array], norm: Norm | None = None, *, interpret: bool = False
) -> tuple[list[jax.Array], jax.Array | None]:
    """The same before it is added up: the parts of each, and those of the squares (`Sums`)."""
    from shardlm.ops.few_rows_kernel import side_by_side  # Pallas takes a while to import

    sizes = _sizes(*x.shape, [w.shape[1] for w in weights], apart=True)
    return side_by_side(x, weights, norm, sizes, interpret)


def gated(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    activation: Activation,
    norm: Norm | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """activation(y @ gate) * (y @ up) [M, F] in x's dtype, where y is x [M, K], up to MOST rows, or its norm, and both
    weights are [K, F]; an activation of GATES."""
    from shardlm.ops.few_rows_kernel import gated_pair

    assert activation in GATES, "checked before (layers/fused.py)"
    sizes = _sizes(*x.shape, [gate.shape[1]], apart=False)
    if -(-gate.shape[1] // sizes.block_columns) < PAIRS:
        of_gate, of_up = products(x, (gate, up), norm, interpret=interpret)
        return activate(of_gate, activation) * of_up
    return gated_pair(x, gate, up, norm, activation, sizes, interpret)


def _sizes(rows: int, summed: int, columns: Sequence[int], apart: bool) -> Sizes:
    assert rows <= MOST, "checked before (layers/fused.py)"
    # 64 bytes of a row of a weight lie together in a program of few rows. What 64 rows are multiplied by is read again
    # for each block of columns, as many bytes as of the weight itself where a block has 32.
    few = rows <= TILE
    blocks = sum(-(-each // 32) for each in columns)
    splits = max(1, min(PROGRAMS // blocks, summed // LEAST)) if apart else 1
    return Sizes(rows, summed, 32 if few else 64, 64, splits, 5 if few else 4)
