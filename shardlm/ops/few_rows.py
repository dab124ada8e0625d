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
# Of a weight, about three for each of a GPU's multiprocessors, which reads ahead in all of them.
PROGRAMS = 384
LEAST = 512  # numbers that are worth a part of their own
# Gates, and what is added to the stream, are made of whole sums: a program goes over all that is summed up. With fewer
# of them sums are made in parts, and what is made of those is a kernel of its own. Of few rows WHOLE are enough, which
# read TILES of weights at a time, for parts that are side by side: as many bytes are under way as with PROGRAMS, and
# products do not all wait for each other, about 33 clocks each.
PAIRS, WHOLE, TILES = 192, 96, 4


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
    side           parts of those that a program sums up side by side
    stages         of reading ahead
    """

    rows: int
    summed: int
    block_columns: int
    step: int
    splits: int
    stages: int
    side: int = 1


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

    sizes = _in_parts(*x.shape, [w.shape[1] for w in weights])
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
    sizes = _of_whole_sums(*x.shape, gate.shape[1], 2)
    if sizes is None:
        of_gate, of_up = products(x, (gate, up), norm, interpret=interpret)
        return activate(of_gate, activation) * of_up
    return gated_pair(x, gate, up, norm, activation, sizes, interpret)


def has_whole_sums(rows: int, summed: int, columns: int, weights: int = 1) -> bool:
    """Whether one program makes a number of the product of rows with a weight [summed, columns], or of the gated pair
    of two: what `added` needs, and what makes `gated` one kernel."""
    return _of_whole_sums(rows, summed, columns, weights) is not None


def added(x: jax.Array, weight: jax.Array, onto: jax.Array | None = None, *, interpret: bool = False) -> jax.Array:
    """x [M, K] times weight [K, F], on top of `onto` [M, F]: [M, F] in x's dtype, rounded once; where the product
    `has_whole_sums`."""
    from shardlm.ops.few_rows_kernel import whole

    sizes = _of_whole_sums(*x.shape, weight.shape[1], 1)
    assert sizes, "checked before (layers/fused.py)"
    return whole(x, weight, onto, sizes, interpret)


def _in_parts(rows: int, summed: int, columns: Sequence[int]) -> Sizes:
    blocks = sum(-(-each // 32) for each in columns)
    splits = max(1, min(PROGRAMS // blocks, summed // LEAST))
    return _sizes(rows, summed, splits)


def _of_whole_sums(rows: int, summed: int, columns: int, weights: int) -> Sizes | None:
    """Of programs that each read some columns of so many weights; None where sums are made in parts."""
    sizes, side = _sizes(rows, summed, 1), TILES // weights
    blocks, steps = -(-columns // sizes.block_columns), -(-summed // sizes.step)
    if rows <= TILE and WHOLE <= blocks < (PAIRS if weights > 1 else PROGRAMS) and steps % side == 0:
        return sizes._replace(side=side, stages=4)  # of which an A100 has room for two: it has 108 multiprocessors
    enough = blocks >= PAIRS if weights > 1 else _in_parts(rows, summed, [columns]).splits == 1
    return sizes if enough else None


def _sizes(rows: int, summed: int, splits: int) -> Sizes:
    assert rows <= MOST, "checked before (layers/fused.py)"
    # 64 bytes of a row of a weight lie together in a program of few rows. What 64 rows are multiplied by is read again
    # for each block of columns, as many bytes as of the weight itself where a block has 32.
    few = rows <= TILE
    return Sizes(rows, summed, 32 if few else 64, 64, splits, 5 if few else 4)
