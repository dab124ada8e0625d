"""What the kernels of the gated delta rule (gated_delta_kernel.py) fit, and what they multiply: told without Pallas and
jax, for whoever counts what they do."""

import math

from shardlm.ops import summed_sizes
from shardlm.ops.summed_sizes import ROWS

BLOCK = 16  # rows of blocks that are inverted by substitution; pairs of larger ones by products


def has_kernels(chunk: int, H: int, V: int, itemsize: int) -> bool:
    """Of chunks of so many tokens, keys of H numbers and values of V: of 16 bits, whole tiles, and states that leave
    registers for others."""
    return chunk == ROWS and H <= 128 and summed_sizes.has_kernels(chunk, H, V, itemsize)


def macs_of_changes(H: int, V: int) -> float:
    """Of each token and head of values: keys by keys, the inverse by whole matrices of two halves each, and what it
    makes of values and keys."""
    doublings = int(math.log2(ROWS // BLOCK))
    return ROWS * (2 * H + V) + doublings * 2 * 3 * ROWS**2


def macs_of_states(H: int, V: int) -> float:
    """Of each token and head of values: what is read of a state, and what is written."""
    return 2 * H * V
