"""What the kernels of the gated delta rule (gated_delta_kernel.py, gated_delta_back_kernel.py) fit, and what they
multiply: told without Pallas and jax, for whoever counts what they do."""

import math
from collections.abc import Mapping

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


def macs_of_outputs(H: int, V: int) -> float:
    """Of each token and head of values: of a state, and whole pieces of pairs (summed_kernel.py)."""
    return H * V + ROWS * (H + V)


def macs_back(H: int, V: int) -> Mapping[str, tuple[float, float]]:
    """Of the kernels of gated_delta_back_kernel.py by name, for each token: (of a head of values, of one of keys)."""
    return {
        "changes_back": (ROWS * (H + V), 0),
        "states_back": (3 * H * V + ROWS * V, 0),  # what is read of a gradient and written to it twice, and T^T
        "pairs_back": (2 * ROWS * V, 2 * ROWS * H),
        "reads_back": (3 * H * V, 4 * ROWS * H),
    }
