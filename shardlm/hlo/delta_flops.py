"""Products of the kernels of the gated delta rule (ops/gated_delta_kernel.py) in a compiled program, by the shapes of
what they make."""

import re

from shardlm.hlo.text import Instruction
from shardlm.ops.gated_delta_sizes import macs_of_changes, macs_of_states
from shardlm.ops.summed_sizes import ROWS

_NAME = re.compile(r'op_name="[^"]*/delta_(changes|states)/pallas_call"')


def delta_flops(at: Instruction) -> tuple[float, tuple[int, int, int]] | None:
    """(FLOPs, and of a product with a state its rows, columns and what is summed over); None for another kernel."""
    named = _NAME.search(at.attributes)
    if not named:
        return None
    first, second, *_ = (array.dims for array in at.arrays)
    if named[1] == "changes":  # of values, and of keys
        (B, T, N, V), H = first, second[3]
        return 2.0 * B * T * N * macs_of_changes(H, V), (ROWS, V, H)
    (*_, H, V), (B, T, N, _) = first, second  # states, and changes
    return 2.0 * B * T * N * macs_of_states(H, V), (ROWS, V, H)
