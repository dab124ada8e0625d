"""What one execution of an instruction of a compiled program computes and moves: as much as a roofline needs."""

import collections
import dataclasses
import json
import math
import re
from typing import Literal

from shardlm.hlo.flops import Matmul, grouped_matmul, matmul
from shardlm.hlo.text import Array, Computation, Instruction, Module

# Names for memory that is there already, and what the host does.
_FREE = {
    *("parameter", "constant", "bitcast", "get-tuple-element", "tuple", "after-all", "partition-id", "replica-id"),
    *("opt-barrier", "optimization-barrier", "domain", "add-dependency", "get-dimension-size"),
}
_SLICES = ("dynamic-slice", "slice", "gather")
_NOTED = re.compile(r'"reification_cost":(\[\{.*?\}\])')
_IDLE = re.compile(r"AllocateBuffer|annotate|Sharding|Pin\b|Unpin\b|SliceToDynamic")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """unit   what limits it: the matrix units by a matmul's shape, attention kernels, or memory alone
    flops  of its matmuls
    nbytes read and written in memory
    dims, dtype  of the matmul with most operations, as in flops.Matmul
    grouped  a matmul of experts, whose rows are not all filled
    """

    unit: Literal["matmul", "attention", "memory"]
    flops: float
    nbytes: float
    dims: tuple[float, float, float] = (0, 0, 0)
    dtype: str = "bf16"
    grouped: bool = False


def kernel(module: Module, computation: Computation, at: Instruction) -> Kernel | None:
    """None for what takes no time of its own: names, and what runs other computations (loops, calls)."""
    if at.opcode in _FREE or at.opcode in ("while", "conditional", "call") or at.opcode.endswith(("-done", "-update")):
        return None
    if at.opcode == "custom-call" and _IDLE.search(at.attributes):
        return None
    nbytes = sum(array.nbytes for array in _changed(module, computation, at))
    nbytes += _read(module, computation, at)
    grouped = grouped_matmul(at, computation)
    found = [grouped] if grouped else _matmuls(module, computation, at)
    if not found:
        return Kernel("memory", 0.0, nbytes)
    largest = max(found, key=lambda one: one.flops)
    flops = sum(one.flops for one in found)
    return Kernel(largest.kernel, flops, nbytes, largest.dims, largest.dtype, grouped is not None)


def noted_seconds(at: Instruction) -> float | None:
    """XLA's own estimate of one execution, where the program was compiled with xla_gpu_collect_cost_model_stats."""
    match = _NOTED.search(at.attributes)
    return json.loads(match[1])[0]["exec_time_us"] * 1e-6 if match else None


def _matmuls(module: Module, computation: Computation, at: Instruction) -> list[Matmul]:
    """Its own, or those of a fusion."""
    if not at.is_fusion:
        one = matmul(at, computation)
        return [one] if one else []
    inner = module.computations[at.called("calls")[0]]
    return [one for other in inner.instructions for one in _matmuls(module, inner, other)]


def _changed(module: Module, computation: Computation, at: Instruction) -> list[Array]:
    """The arrays that it writes: of a fusion that updates part of an array in place, that part."""
    if at.opcode == "dynamic-update-slice":
        return list(computation.named[at.operands[1]].arrays)
    if not at.is_fusion:
        return list(at.arrays)
    inner = module.computations[at.called("calls")[0]]
    roots = [inner.named[name] for name in inner.root.operands] if inner.root.opcode == "tuple" else [inner.root]
    found = []
    for root in roots:
        last = _through(inner, root)
        found += inner.named[last.operands[1]].arrays if last.opcode == "dynamic-update-slice" else root.arrays
    return found


def _through(inner: Computation, at: Instruction) -> Instruction:
    """What a chain of other names for the same memory stands for."""
    while at.opcode in ("bitcast", "copy") and len(at.operands) == 1:
        at = inner.named[at.operands[0]]
    return at


def _read(module: Module, computation: Computation, at: Instruction) -> float:
    """Bytes that it reads of its operands: of a fusion's, what its results take of them."""
    whole = [sum(array.nbytes for array in computation.named[name].arrays) for name in at.operands]
    if at.is_fusion:
        inner = module.computations[at.called("calls")[0]]
        asked = _demanded(inner)
        parameters = {int(one.inside): one.name for one in inner.instructions if one.opcode == "parameter"}
        return sum(nbytes * asked.get(parameters[place], 0.0) for place, nbytes in enumerate(whole))
    if at.opcode in _SLICES:
        whole[0] = min(whole[0], sum(array.nbytes for array in at.arrays))
    elif at.opcode == "dynamic-update-slice":
        whole[0] = 0  # it stays where it is
    return sum(whole)


def _demanded(inner: Computation) -> dict[str, float]:
    """Of each value of a fusion, the share of its elements that anything asks for: its loop makes the elements of its
    results, and for each only what that takes. Of a slice of an array that is cast first, the slice is cast."""
    roots = set(inner.root.operands) if inner.root.opcode == "tuple" else {inner.root.name}
    asked: dict[str, float] = collections.defaultdict(float)
    for at in reversed(inner.instructions):
        kept = at.name in roots or at.is_root
        share = 1.0 if kept else min(1.0, asked[at.name])
        if not share:
            continue
        for place, name in enumerate(at.operands):
            if at.opcode == "dynamic-update-slice" and place == 0 and _stays(inner, at, roots):
                continue
            asked[name] += _asked(at, inner.named[name], place, share)
        asked[at.name] = share
    return asked


def _asked(at: Instruction, operand: Instruction, place: int, share: float) -> float:
    """The share of an operand that so much of a result takes."""
    made, there = _elements(at), _elements(operand)
    if at.opcode in _SLICES and place == 0:
        return share * made / there if there else 0.0
    return min(1.0, share * max(1.0, made / there)) if there else 0.0


def _stays(inner: Computation, at: Instruction, roots: set[str]) -> bool:
    """Whether the array that a slice is put into is the fusion's own result, in its place."""
    return any(_through(inner, inner.named[name]) is at for name in roots)


def _elements(at: Instruction) -> int:
    return sum(math.prod(array.dims) for array in at.arrays)
