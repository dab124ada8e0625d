"""What each instruction of a compiled program is to a user: a layer's computation, forward or backward, or a collective
over mesh axes. For whoever has the names of instructions alone, as a trace of a GPU does."""

import dataclasses
import re
from collections.abc import Mapping

from shardlm.hlo.collectives import KINDS
from shardlm.hlo.flops import matmul_of
from shardlm.hlo.groups import spanned_axes
from shardlm.hlo.origin import origins, phase
from shardlm.hlo.rows import communication, layer_of
from shardlm.hlo.text import Computation, Instruction, Module, parse
from shardlm.hlo.walk import Visit, collect

PHASES = ("forward", "backward", "other")
_CONTAINERS = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class Label:
    """row       of rows.py: a kind of layer, or a collective with its axes
    phase     one of PHASES
    sends     whether it is a collective
    contains  whether it runs other instructions, whose time is its own
    """

    row: str
    phase: str
    sends: bool
    contains: bool


class Labels:
    """The labels of one program. `text` is `Compiled.as_text()`; `mesh` is axis -> size, outermost first.

    Raises ShardlmError for text that is not an optimised module.
    """

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.name = re.match(r"HloModule ([\w.\-]+)", text)[1] if text.startswith("HloModule") else ""
        self._module, self._mesh = parse(text), dict(mesh)
        computations = self._module.computations.values()
        self._known: dict[str, Label] = {}
        self._homes = {at.name: computation for computation in computations for at in computation.instructions}

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def of(self, name: str) -> Label:
        """Of the instruction `name`, which is in the program. Of an asynchronous pair, both halves are the collective.

        Raises ShardlmError for replica groups that do not fit the mesh.
        """
        if name not in self._known:
            self._known[name] = self._label(name)
        return self._known[name]

    def _label(self, name: str) -> Label:
        home = self._homes[name]
        at = home.named[name]
        sender = _collective(self._module, home, at)
        axes = spanned_axes(sender, self._mesh) if sender else ()
        layer, when = self._origin(home, at)
        row = communication(_kind(sender), axes) if axes else layer
        return Label(row, when, bool(axes), at.opcode in _CONTAINERS)

    def _origin(self, home: Computation, at: Instruction) -> tuple[str, str]:
        """(kind of layer, phase): of the first origin that is in a layer, else of the first."""
        first = None
        for op_name, frames in origins(self._module, home, at):
            found = layer_of(frames), phase(op_name)
            if found[0] != "other":
                return found
            first = first or found
        return first or ("other", "other")

    def flops(self) -> dict[tuple[str, str], float]:
        """(kind of layer, phase) -> FLOPs of all matmuls in one run of the program on one device, counted as flops.py
        does: loops included, recomputation too, of a conditional the branch with most."""

        def find(visit: Visit) -> list[tuple[str, str, float]]:
            flops = matmul_of(visit.instruction, visit.computation)
            if not flops:
                return []
            while visit.caller and visit.caller.instruction.is_fusion:  # the kernel that is timed
                visit = visit.caller
            label = self.of(visit.instruction.name)
            return [(label.row, label.phase, flops * visit.count)]

        totals: dict[tuple[str, str], float] = {}
        for row, when, flops in collect(self._module, find, lambda found: sum(flops for *_, flops in found)):
            totals[row, when] = totals.get((row, when), 0.0) + flops
        return totals


def _collective(module: Module, home: Computation, at: Instruction) -> Instruction | None:
    """The collective that an instruction is, starts, ends or holds: XLA wraps some in fusions or asynchronous calls."""
    if at.opcode.endswith(("-done", "-update")) and at.operands:
        return _collective(module, home, home.named[at.operands[0]])
    if _kind(at) in KINDS:
        return at
    if at.opcode not in ("fusion", "async-start"):
        return None
    inner = (one for name in at.called("calls") for one in module.computations[name].instructions)
    return next((one for one in inner if _kind(one) in KINDS), None)


def _kind(at: Instruction) -> str:
    return at.opcode.removesuffix("-start")
