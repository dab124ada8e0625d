"""Floating-point operations that one device runs: matmuls, wherever they are (dots inside fusions, cuBLAS calls) and
cuDNN's attention. Elementwise work is not counted."""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Mapping

from shardlm.hlo.text import Computation, Instruction, parse
from shardlm.hlo.walk import collect

_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# Memory and bookkeeping; without operations to count.
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
        unknown = target[1] if target and not _FREE.search(target[1]) else ""
        return [(flops or 0.0, unknown, visit.count)] if flops or unknown else []

    found = collect(parse(text), find, lambda items: sum(flops * count for flops, _, count in items))
    uncounted: collections.Counter = collections.Counter()
    for _, unknown, count in found:
        uncounted[unknown] += count if unknown else 0
    return Work(sum(flops * count for flops, _, count in found), {name: n for name, n in uncounted.items() if n})


def matmul_of(at: Instruction, computation: Computation) -> float | None:
    """FLOPs of one execution of an instruction; None for what is not a matmul that can be read."""
    if at.opcode == "dot":
        return _dot(at, computation, re.search(r"lhs_contracting_dims=\{([\d,]*)\}", at.attributes))
    if at.opcode != "custom-call":
        return None
    target = _TARGET.search(at.attributes)[1]
    if target.startswith("__cublas"):
        return _dot(at, computation, re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', at.attributes))
    if target.startswith("__cudnn$fmha"):
        return _attention(at, computation) * (2.5 if "Backward" in target else 1)  # five matmuls, forward two
    return None


def _dot(at: Instruction, computation: Computation, contracted: re.Match) -> float:
    sides = computation.named[at.operands[0]].arrays[0].dims
    summed = math.prod(sides[int(i)] for i in re.findall(r"\d+", contracted[1]))
    return 2.0 * math.prod(at.arrays[0].dims) * summed


def _attention(at: Instruction, computation: Computation) -> float:
    """Both matmuls over the pairs that a causal mask or a window leaves, whatever documents mask besides."""
    config = json.loads(at.attributes[at.attributes.index("backend_config=") + 15 :])["cudnn_fmha_backend_config"]
    *batch, T, S = map(int, config["intermediate_tensor_shape"]["dimensions"])
    window = config.get("sliding_window_length", 0) or S
    causal = "CAUSAL" in config["mask_type"]
    pairs = sum(min(t + 1 + S - T, window) for t in range(T)) if causal else T * S
    return 4.0 * math.prod(batch) * pairs * computation.named[at.operands[0]].arrays[0].dims[-1]
