"""Floating-point operations that one device runs: matmuls, wherever they are (dots inside fusions, cuBLAS calls) and
cuDNN's attention. Elementwise work is not counted."""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Literal

from shardlm.hlo.delta_flops import delta_flops
from shardlm.hlo.mamba_flops import summed_flops
from shardlm.hlo.text import Computation, Instruction, parse
from shardlm.hlo.walk import collect

_TRITON = "__gpu$xla.gpu.triton"
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# Memory and bookkeeping; without operations to count.
_SUMS = re.compile(r'op_name="[^"]*/sums_of_one\w*/pallas_call"')  # a kernel of ours without products
_FREE = re.compile(r"Sharding|SPMD|annotate|AllocateBuffer|MoveTo|TopK|Pin|Unpin|cub\$")


@dataclasses.dataclass(frozen=True)
class Work:
    """flops of one run of the program on one device, a multiplication and an addition being two; `uncounted` are custom
    calls that may compute but whose operations are not known, target -> executions."""

    flops: float
    uncounted: Mapping[str, int]


def matmul_flops(text: str) -> Work:
    """text is `Compiled.as_text()`. Loops count as often as they run; of a conditional, the branch with most flops.
    Raises ShardlmError for text that is not an optimised module."""

    def find(visit):
        at = visit.instruction
        flops = matmul_of(at, visit.computation)
        target = _TARGET.search(at.attributes) if at.opcode == "custom-call" and flops is None else None
        free = target and (_FREE.search(target[1]) or _SUMS.search(at.attributes))
        unknown = target[1] if target and not free else ""
        return [(flops or 0.0, unknown, visit.count)] if flops or unknown else []

    found = collect(parse(text), find, lambda items: sum(flops * count for flops, _, count in items))
    uncounted: collections.Counter = collections.Counter()
    for _, unknown, count in found:
        uncounted[unknown] += count if unknown else 0
    return Work(sum(flops * count for flops, _, count in found), {name: n for name, n in uncounted.items() if n})


def matmul_of(at: Instruction, computation: Computation) -> float | None:
    """FLOPs of one execution of an instruction; None for what is not a matmul that can be read."""
    found = matmul(at, computation)
    return found.flops if found else None


@dataclasses.dataclass(frozen=True)
class Matmul:
    """Of one execution of one instruction.

    dims    rows, columns and what is summed over, of one of its products
    dtype   of its operands, as hardware.Peak.of takes it
    kernel  "matmul", or "attention": both products of softmax attention in one kernel
    """

    flops: float
    dims: tuple[float, float, float]
    dtype: str
    kernel: Literal["matmul", "attention"] = "matmul"


def matmul(at: Instruction, computation: Computation) -> Matmul | None:
    """None for what is not a matmul that can be read."""
    if at.opcode == "dot":
        return _dot(at, computation, re.search(r"lhs_contracting_dims=\{([\d,]*)\}", at.attributes))
    if at.opcode != "custom-call":
        return None
    target = _TARGET.search(at.attributes)[1]
    if target.startswith("__cublas"):
        return _dot(at, computation, re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', at.attributes))
    if target.startswith("__cudnn$fmha"):
        return _attention(at, computation, (3, 2) if "Backward" in target else (1, 1))
    if target == _TRITON and "chunk_states" in at.attributes:
        return _states(at, computation)
    return _in_chunks(at, computation) if target == _TRITON else None


def _states(at: Instruction, computation: Computation) -> Matmul:
    """Of the kernel that carries states of linear attention (ops/states_kernel.py): of each chunk and head a product of
    its second operand [n, rows, H, H] with a state [H, V]."""
    of_chunks, into = (computation.named[name].arrays[0] for name in at.operands[1:3])
    (*_, H), V = of_chunks.dims, into.dims[-1]
    return Matmul(2.0 * math.prod(of_chunks.dims) * V, (H, V, H), _peak(of_chunks.dtype))


def _in_chunks(at: Instruction, computation: Computation) -> Matmul | None:
    """Of the other kernels of linear attention."""
    given = [computation.named[name].arrays[0] for name in at.operands]
    found = delta_flops(at, given) or summed_flops(at, given)
    return Matmul(*found, "bf16") if found else None  # as fast as float16


_FLOATS = ("bf16", "f16", "f32")


def grouped_matmul(at: Instruction, computation: Computation) -> Matmul | None:
    """Of a kernel of experts' matmuls, which tokamax writes in Mosaic or, for gradients of weights on Blackwell and for
    all on Ampere, in Triton: what all rows of its buffers would take. How many are filled, only the running program
    knows, so that `matmul_flops` does not count it."""
    target = _TARGET.search(at.attributes) if at.opcode == "custom-call" else None
    written = target and (target[1].startswith("mosaic_gpu") or target[1] == _TRITON)
    if not written or "ragged_dot" not in at.attributes:
        return None
    # Rows and weights are its numbers, in this order; sizes of groups stand before them on Hopper, else after them.
    operands = (computation.named[name].arrays[0] for name in at.operands)
    left = next((a for a in operands if a.dtype in _FLOATS and len(a.dims) > 1), None)
    if left is None:
        return None
    columns = at.arrays[0].dims[-1]
    summed = left.dims[-1]
    return Matmul(2.0 * math.prod(left.dims) * columns, (left.dims[0], columns, summed), _peak(left.dtype))


def _dot(at: Instruction, computation: Computation, contracted: re.Match) -> Matmul:
    left = computation.named[at.operands[0]].arrays[0]
    right = computation.named[at.operands[1]].arrays[0]
    summed = math.prod(left.dims[int(i)] for i in re.findall(r"\d+", contracted[1]))
    products = math.prod(at.arrays[0].dims)
    # Of a batch the rows of all are one: products = batch * rows * columns, right = batch * summed * columns.
    batch = round(math.prod(left.dims) * math.prod(right.dims) / summed**2 / products) if products else 1
    columns = math.prod(right.dims) / summed / max(batch, 1)
    dtype = _peak(left.dtype, exact="highest" in at.attributes.lower())  # cuBLAS calls have it in capitals
    return Matmul(2.0 * products * summed, (products / columns, columns, summed), dtype)


def _attention(at: Instruction, computation: Computation, matmuls: tuple[int, int]) -> Matmul:
    """Matmuls as wide as keys and as wide as values, so many each, over the pairs that a causal mask or a window
    leaves, whatever documents mask besides."""
    config = json.loads(at.attributes[at.attributes.index("backend_config=") + 15 :])["cudnn_fmha_backend_config"]
    *batch, T, S = map(int, config["intermediate_tensor_shape"]["dimensions"])
    window = config.get("sliding_window_length", 0) or S
    causal = "CAUSAL" in config["mask_type"]
    pairs = sum(min(t + 1 + S - T, window) for t in range(T)) if causal else T * S
    query, value = (computation.named[at.operands[n]].arrays[0] for n in (0, 2))
    widths = query.dims[-1], value.dims[-1]
    flops = 2.0 * math.prod(batch) * pairs * sum(n * width for n, width in zip(matmuls, widths, strict=True))
    return Matmul(flops, (T, pairs / T, sum(widths) / 2), _peak(query.dtype), "attention")


def _peak(dtype: str, exact: bool = False) -> str:
    """The units that multiply it: float32 goes through TF32 unless told otherwise."""
    if dtype == "f32":
        return "fp32" if exact else "tf32"
    return {"bf16": "bf16", "f16": "fp16", "s8": "int8", "s32": "int8"}.get(dtype, "fp8" if "f8" in dtype else "fp32")
