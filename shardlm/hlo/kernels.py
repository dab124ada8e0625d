"""What one execution of an instruction of a compiled program computes and moves: as much as a roofline needs."""

import dataclasses
import json
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
    nbytes += sum(_read(module, computation, at, place) for place in range(len(at.operands)))
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
    if at.opcode != "fusion":
        one = matmul(at, computation)
        return [one] if one else []
    inner = module.computations[at.called("calls")[0]]
    return [one for other in inner.instructions for one in _matmuls(module, inner, other)]


def _changed(module: Module, computation: Computation, at: Instruction) -> list[Array]:
    """The arrays that it writes: of a fusion that updates part of an array in place, that part."""
    if at.opcode == "dynamic-update-slice":
        return list(computation.named[at.operands[1]].arrays)
    if at.opcode != "fusion":
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


def _read(module: Module, computation: Computation, at: Instruction, place: int) -> float:
    """Bytes that it reads of an operand: of one that a fusion only slices, or updates in place, the slices."""
    whole = sum(array.nbytes for array in computation.named[at.operands[place]].arrays)
    if at.opcode in _SLICES and place == 0:
        return min(whole, sum(array.nbytes for array in at.arrays))
    if at.opcode == "dynamic-update-slice" and place == 0:
        return 0.0  # it stays where it is
    if at.opcode != "fusion":
        return whole
    inner = module.computations[at.called("calls")[0]]
    parameter = next(i for i in inner.instructions if i.opcode == "parameter" and i.inside == str(place))
    return min(whole, _used(inner, parameter, whole))


def _used(inner: Computation, value: Instruction, whole: float) -> float:
    total = 0.0
    for user in inner.instructions:
        for place, name in enumerate(user.operands):
            if name != value.name:
                continue
            if user.opcode in _SLICES and place == 0:
                total += sum(array.nbytes for array in user.arrays)
            elif user.opcode == "dynamic-update-slice" and place == 0:
                total += 0.0  # it stays where it is
            elif user.opcode == "bitcast":
                total += _used(inner, user, whole)
            else:
                total += whole
    return total
