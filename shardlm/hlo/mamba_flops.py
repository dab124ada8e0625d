"""Products of the kernels of Mamba 2 (ops/summed_kernel.py, summed_back_kernel.py) in a compiled program, by the shapes
of what they are given."""

import re
from collections.abc import Sequence

from shardlm.hlo.text import Array, Instruction
from shardlm.ops.summed_sizes import ROWS

_NAME = re.compile(r'op_name="[^"]*/summed_(\w+)/pallas_call"')


def summed_flops(at: Instruction, given: Sequence[Array]) -> tuple[float, tuple[int, int, int]] | None:
    """(FLOPs, and of the product with a state its rows, columns and what is summed over); None for another kernel.
    `given`: its operands."""
    named = _NAME.search(at.attributes)
    if not named:
        return None
    near = [a.dims for a in (*given, *at.arrays) if a.dtype in ("bf16", "f16")]
    B, chunks, N, H, V = next(dims for dims in near if len(dims) == 5)  # states
    tokens = next(dims[1] for dims in near if len(dims) == 4)
    chunk = tokens // chunks
    pairs = (chunk + ROWS) / 2  # of each token, whole pieces of its chunk
    each = {  # of a head and token: the product with a state, and pairs as wide as keys and as values
        "states": H * V,
        "outputs": H * V + pairs * (H + V),
        "values_back": H * V + pairs * (H + 2 * V),
        "queries_back": H * V + pairs * V,
        "keys_back": H * V + pairs * V,
    }[named[1]]
    flops = 2.0 * B * tokens * N * each
    if named[1] in ("queries_back", "keys_back"):  # whose heads are summed before they are multiplied
        parts, _, _, groups, _ = at.arrays[0].dims
        flops += 2.0 * B * tokens * parts * groups * pairs * H * (2 if named[1] == "queries_back" else 1)
    return flops, (chunk, V, H)
