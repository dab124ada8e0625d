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
# Blocks of 128 columns, so that 256 bytes of each row of a weight lie together: by 32 gate and up of Llama 3 8B, which
# are 235 MB, took 128 us, and by 128 they take 54 for 2 rows and 59 for 64 (H200, measured; 49 at its memory's rate).
COLUMNS, STEP, STAGES = 128, 64, 4
# Compute capabilities that have 99 KB of shared memory for a program, where four stages of two weights take 102 to 120,
# and an A100's, where two programs of few rows have room beside each other with three: 112 on 108 multiprocessors.
TIGHT, FEWER_STAGES = ("8.0", "8.6", "8.9", "12.0", "12.1"), 3
# Of a GPU's 132 multiprocessors (H100). What is summed over is cut in parts, powers of two, of at least LEAST numbers,
# up to so many programs; fewer than LONE wait for too few reads at a time.
PROGRAMS, LEAST, LONE = 192, 512, 80


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
    splits         parts that are summed up apart
    """

    rows: int
    summed: int
    splits: int


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
    How sums are cut depends on the weights and not on the number of rows."""
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
    if not is_one(gate.shape[1]):
        of_gate, of_up = products(x, (gate, up), norm, interpret=interpret)
        return activate(of_gate, activation) * of_up
    return gated_pair(x, gate, up, norm, activation, Sizes(*x.shape, 1), interpret)


def is_one(columns: int) -> bool:
    """Whether `gated` is one kernel for weights of so many columns: gates are made of whole sums."""
    return blocks_of(columns) >= LONE


def blocks_of(columns: int) -> int:
    return -(-columns // COLUMNS)


def _in_parts(rows: int, summed: int, columns: Sequence[int]) -> Sizes:
    assert rows <= MOST, "checked before (layers/fused.py)"
    blocks = sum(map(blocks_of, columns))
    most = min(PROGRAMS // blocks, summed // LEAST)
    return Sizes(rows, summed, 1 << max(0, most.bit_length() - 1))
