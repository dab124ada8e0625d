"""Products of the kernels of the gated delta rule (ops/gated_delta_kernel.py, gated_delta_back_kernel.py) in a compiled
program, by the shapes of what they make and are given."""

import re
from collections.abc import Sequence

from shardlm.hlo.text import Array, Instruction
from shardlm.ops.gated_delta_sizes import macs_back, macs_of_changes, macs_of_states
from shardlm.ops.summed_sizes import ROWS

_NAME = re.compile(r'op_name="[^"]*/delta_(changes|states|\w+_back)/pallas_call"')


def delta_flops(at: Instruction, given: Sequence[Array]) -> tuple[float, tuple[int, int, int]] | None:
    """(FLOPs, and of a product with a state its rows, columns and what is summed over); None for another kernel.
    `given`: its operands."""
    named = _NAME.search(at.attributes)
    if not named:
        return None
    if named[1].endswith("_back"):  # of tokens in 16 bits the first are queries, and the last gradients of outputs
        (B, T, K, H), *_, (*_, N, V) = (a.dims for a in given if a.dtype in ("bf16", "f16") and len(a.dims) == 4)
        of_values, of_keys = macs_back(H, V)[named[1]]
        return 2.0 * B * T * (N * of_values + K * of_keys), (ROWS, V, H)
    first, second, *_ = (array.dims for array in at.arrays)
    if named[1] == "changes":  # of values, and of keys
        (B, T, N, V), H = first, second[3]
        return 2.0 * B * T * N * macs_of_changes(H, V), (ROWS, V, H)
    (*_, H, V), (B, T, N, _) = first, second  # states, and changes
    return 2.0 * B * T * N * macs_of_states(H, V), (ROWS, V, H)
