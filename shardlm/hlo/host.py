"""Copies between a GPU's memory and its host's in a compiled program."""

import dataclasses
from typing import Literal

from shardlm.hlo.text import Computation, Instruction, Module

_COPIES = ("copy", "copy-start", "fusion", "fusion-start", "dynamic-slice", "dynamic-update-slice")
Direction = Literal["to the host", "from the host"]


@dataclasses.dataclass(frozen=True)
class HostCopy:
    """One execution."""

    direction: Direction
    nbytes: int


def host_copy(module: Module, computation: Computation, at: Instruction) -> HostCopy | None:
    """What `at` copies to or from the host, or begins to: an array, or a slice of one that rests there. None for all
    else."""
    if at.opcode not in _COPIES or not _on_host(computation, at):
        return None
    if at.opcode == "copy-start":  # (copy, original, context)
        return HostCopy("to the host" if at.arrays[0].on_host else "from the host", at.arrays[0].nbytes)
    if inner := at.called("calls"):
        called = module.computations[inner[0]]
        return next(filter(None, (host_copy(module, called, one) for one in called.instructions)), None)
    if at.opcode == "dynamic-update-slice":
        return HostCopy("to the host", computation.named[at.operands[1]].arrays[0].nbytes)
    result = at.arrays[0]
    return HostCopy("to the host" if result.on_host else "from the host", result.nbytes)


def _on_host(computation: Computation, at: Instruction) -> bool:
    operands = (computation.named[name].arrays for name in at.operands if name in computation.named)
    arrays = [*at.arrays, *(array for of_one in operands for array in of_one)]
    return any(array.on_host for array in arrays)
