"""What a collective moves, and why: the program's argument it stems from, the phase of the step and the place in the
source."""

import re
from collections.abc import Callable, Iterable

from shardlm.hlo.text import Computation, Frame, Instruction, Module
from shardlm.hlo.walk import Visit

# What changes how an array lies or how much of it there is, but not whose it is.
_SAME = {
    *("bitcast", "copy", "convert", "reshape", "transpose", "slice", "dynamic-slice", "optimization-barrier"),
    *("all-gather", "all-gather-start", "all-gather-done", "copy-start", "copy-done"),
}


def argument(module: Module, visit: Visit, operand: str) -> str:
    """The program's argument that `operand` is, or a part of it; "" if it is computed.

    For instance "state.params.segments.0.blocks.0.mlp.up": a weight is followed through slices, casts and loops.
    """
    found = _trace(module, visit.computation, operand, ())
    while found:
        number, path = found
        caller = visit.caller
        if caller is None:
            return _dotted(_parameter(visit.computation, number).op_name)
        found = _trace(module, caller.computation, caller.instruction.operands[number], path)
        visit = caller
    return ""


def _trace(module: Module, computation: Computation, name: str, path: tuple[int, ...]) -> tuple | None:
    """Follows element `path` of a value back to (number of the computation's parameter, element of it)."""
    while name in computation.named:
        at = computation.named[name]
        if at.opcode == "parameter":
            return int(at.inside), path
        if at.opcode == "get-tuple-element":
            path = (at.number("index"), *path)
        elif at.opcode == "tuple" and path:
            name, path = at.operands[path[0]], path[1:]
            continue
        elif at.opcode == "fusion":
            fused = module.computations[at.called("calls")[0]]
            inner = _trace(module, fused, fused.root.name, path)
            if inner is None:
                return None
            name, path = at.operands[inner[0]], inner[1]
            continue
        elif at.opcode == "while" and path:
            pass  # the same element of what the loop began with
        elif at.opcode not in _SAME:
            return None
        name = at.operands[0]
    return None


def _parameter(computation: Computation, number: int) -> Instruction:
    return next(i for i in computation.instructions if i.opcode == "parameter" and i.inside == str(number))


def _dotted(op_name: str) -> str:
    """state.params['blocks'][0] -> state.params.blocks.0"""
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", lambda m: f".{m[1] or m[2]}", op_name)


def cause(module: Module, visit: Visit, operand: str) -> tuple[str, tuple[Frame, ...]]:
    """(op_name, frames) of the array that is moved: of the collective itself or, where several arrays were combined or
    nothing was noted, of the nearest instruction before it, or after it, that has them."""
    at, named = visit.instruction, visit.computation.named
    if at.op_name and len(at.operands) == 1:
        return at.op_name, module.frames(at)
    before = _nearest(operand, lambda name: named[name].operands if name in named else ())
    users: dict[str, list[str]] = {}
    for other in visit.computation.instructions:
        for name in other.operands:
            users.setdefault(name, []).append(other.name)
    after = _nearest(at.name, lambda name: users.get(name, ()))
    for name in (*before, at.name, *after):
        maker = _maker(module, visit.computation, name)
        if maker.op_name and maker.opcode != "parameter":
            return maker.op_name, module.frames(maker)
    return "", ()


def _nearest(start: str, neighbours: Callable[[str], Iterable[str]], limit: int = 50) -> list[str]:
    """Up to `limit` names, breadth first."""
    found = [start]
    for name in found:
        if len(found) >= limit:
            break
        found += [other for other in neighbours(name) if other not in found]
    return found


def _maker(module: Module, computation: Computation, name: str) -> Instruction:
    """What computed a value: for an element of a fusion's result, that element inside the fusion."""
    at = computation.named[name]
    if at.opcode != "get-tuple-element" or at.operands[0] not in computation.named:
        return at
    fusion = computation.named[at.operands[0]]
    if fusion.opcode != "fusion":
        return at
    fused = module.computations[fusion.called("calls")[0]]
    return fused.named[fused.root.operands[at.number("index")]] if fused.root.opcode == "tuple" else at


def phase(op_name: str) -> str:
    """forward or backward, by what jax notes of differentiation; "other" outside of it. What the backward pass
    computes again is backward."""
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "other"
