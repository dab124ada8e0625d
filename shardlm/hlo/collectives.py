"""The collectives that a compiled program runs: kind, mesh axes, bytes, how often, and what in the source they come
from. Totals, records and comparison are bill.py's."""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from shardlm.hlo.groups import spanned_axes
from shardlm.hlo.origin import argument, cause, phase
from shardlm.hlo.text import Array, Frame, Module, parse
from shardlm.hlo.walk import Visit, collect

KINDS = (
    *("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
_KERNELS = ("fusion", "custom-call", "dot", "convolution", "while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that a collective moves. XLA combines arrays into one collective as it sees fit; each is listed apart.

    kind          one of KINDS
    axes          of the mesh along which devices of a group differ, outermost first
    group_size    devices that exchange with each other
    dtype         as XLA spells it: bf16, f32, f8e4m3fn, ...
    bytes         of the whole array on one device in one execution, on the side where it is larger: what an all-gather
                  gives and a reduce-scatter takes; for the other kinds both sides are equal (of a ragged all-to-all,
                  whose sizes the program decides as it runs, the most that it may send)
    count         executions in one run of the program, loops included
    combined      arrays moved by the same collective
    asynchronous  whether kernels run between its start and its end
    depth         loops around it
    phase         forward, backward or other (origin.py)
    argument      the program's argument that is moved, for instance a weight; "" for what is computed
    op_name       as jax names the operation
    frames        where in the source, innermost first
    guess         why the count is not certain; "" if it is
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    bytes: int
    count: int
    combined: int
    asynchronous: bool
    depth: int
    phase: str
    argument: str
    op_name: str
    frames: tuple[Frame, ...]
    guess: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution by the ring algorithm: an all-reduce is a reduce-scatter and an
        all-gather, (n-1)/n of the array each (https://arxiv.org/abs/1909.08053 counts alike)."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        return self.bytes * (self.group_size - 1) / self.group_size * (2 if self.kind == "all-reduce" else 1)


def collectives(text: str, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """All that the program communicates; equal ones are one entry with the sum of their counts, in program order.

    text is `Compiled.as_text()`, mesh is axis -> size, outermost first. Raises ShardlmError for text that is not an
    optimised module, and for replica groups that do not fit the mesh.
    """
    module = parse(text)
    found = collect(module, lambda visit: moved_by(module, visit, mesh), _weigh)
    counts: collections.Counter = collections.Counter()
    for one in found:
        counts[dataclasses.replace(one, count=0)] += one.count
    return tuple(dataclasses.replace(one, count=count) for one, count in counts.items())


def _weigh(found: Sequence[Collective]) -> float:
    return sum(one.wire_bytes * one.count for one in found)


def moved_by(module: Module, visit: Visit, mesh: Mapping[str, int]) -> list[Collective]:
    """The arrays that one instruction communicates; none if it is no collective."""
    at = visit.instruction
    kind = at.opcode.removesuffix("-start")
    axes = spanned_axes(at, mesh) if kind in KINDS else ()
    if not axes:
        return []
    size = math.prod(mesh[axis] for axis in axes)
    moved = _moved(visit, kind)
    overlapped = _overlapped(visit)
    found = []
    for operand, arrays in moved:
        op_name, frames = cause(module, visit, operand)
        nbytes = sum(array.nbytes for array in arrays)
        found.append(
            Collective(
                kind=kind,
                axes=axes,
                group_size=size,
                dtype=arrays[0].dtype,
                bytes=nbytes * size if kind == "all-gather" else nbytes,
                count=visit.count,
                combined=len(moved),
                asynchronous=overlapped,
                depth=visit.depth,
                phase=phase(op_name),
                argument=argument(module, visit, operand),
                op_name=op_name,
                frames=frames,
                guess=visit.guess,
            )
        )
    return found


def _moved(visit: Visit, kind: str) -> list[tuple[str, tuple[Array, ...]]]:
    """(operand, its arrays) of each array that is moved."""
    named = visit.computation.named
    operands = [(name, named[name].arrays) for name in visit.instruction.operands]
    if kind == "ragged-all-to-all":  # the others say where to put what
        return operands[:1]
    if kind == "all-to-all":  # XLA may hand each device's part as an operand of its own
        return [(operands[0][0], tuple(array for _, arrays in operands for array in arrays))]
    return operands


def _overlapped(visit: Visit) -> bool:
    """Whether it is issued in two halves, not marked synchronous, with kernels between them."""
    while visit.caller and not visit.instruction.opcode.endswith("-start"):
        visit = visit.caller
        if not visit.instruction.called("calls"):
            return False
    start = visit.instruction
    if not start.opcode.endswith("-start") or '"is_sync":true' in start.attributes:
        return False
    between = 0
    order = visit.computation.instructions
    for other in order[order.index(start) + 1 :]:
        if start.name in other.operands and re.search(r"-(done|update)$", other.opcode):
            return between > 0
        between += other.opcode in _KERNELS
    return False
