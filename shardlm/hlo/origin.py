"""What a collective moves, and why: the program's argument it stems from, the phase of the step and the place in the
source."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator

from shardlm.hlo.text import Computation, Frame, Instruction, Module
from shardlm.hlo.walk import Visit

# What changes how an array lies or how much of it there is, but not whose it is.
_SAME = {
    *("bitcast", "copy", "convert", "reshape", "transpose", "slice", "dynamic-slice", "optimization-barrier"),
    *("all-gather", "all-gather-start", "all-gather-done", "copy-start", "copy-done", "fusion-done"),
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
        elif at.is_fusion:
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
    at, here = visit.instruction, visit.computation
    if _is_noted(at) and len(at.operands) == 1:
        return at.op_name, module.frames(at)
    makers = _nearest((here, operand), lambda place: _makers(module, *place))
    for computation, name in (*makers, *_nearest((here, at.name), _users)):
        if _is_noted(one := computation.named[name]):
            return one.op_name, module.frames(one)
    return "", ()


def origins(module: Module, here: Computation, at: Instruction) -> Iterator[tuple[str, tuple[Frame, ...]]]:
    """(op_name, frames) of an instruction that computes: of the matmul in it, if it is a fusion with one, else its own
    or, of what it fuses, the last one's. Where nothing was noted, those of its makers and users, the nearest first."""
    fused = module.computations[at.called("calls")[0]].instructions if at.is_fusion else ()
    matmuls = [inner for inner in fused if inner.opcode == "dot"]
    for one in (*matmuls, at, *reversed(fused)):
        if _is_noted(one):
            yield one.op_name, module.frames(one)
            return
    makers = _nearest((here, at.name), lambda place: _makers(module, *place))
    for places in itertools.zip_longest(makers, _nearest((here, at.name), _users)):
        for computation, name in filter(None, places):
            if _is_noted(one := computation.named[name]):
                yield one.op_name, module.frames(one)


def _is_noted(at: Instruction) -> bool:
    """Whether it has a name of jax's; XLA makes some up, and arguments have theirs."""
    return "/" in at.op_name


_Place = tuple[Computation, str]


def _nearest(start: _Place, neighbours: Callable[[_Place], Iterable[_Place]], limit: int = 50) -> list[_Place]:
    """Up to about `limit` values, breadth first."""
    found, seen = [start], {(start[0].name, start[1])}
    for place in found:
        for computation, name in neighbours(place) if len(found) < limit else ():
            if (computation.name, name) not in seen:
                seen.add((computation.name, name))
                found.append((computation, name))
    return found


def _makers(module: Module, computation: Computation, name: str) -> list[_Place]:
    """The values that a value is computed from, into loops and fusions; of what a loop carries, the next one."""
    at, places = computation.named[name], []
    if at.opcode == "get-tuple-element":
        index, whole = at.number("index"), computation.named[at.operands[0]]
        inner = computation if whole.opcode == "parameter" else _inside(module, whole)
        if inner and inner.root.opcode == "tuple" and index < len(inner.root.operands):
            return [(inner, inner.root.operands[index])]
    elif inner := _inside(module, at):
        places = [(inner, inner.root.name)]
    return places + [(computation, other) for other in at.operands]


def _inside(module: Module, at: Instruction) -> Computation | None:
    names = at.called("body" if at.opcode == "while" else "calls" if at.is_fusion else "-")
    return module.computations[names[0]] if names else None


def _users(place: _Place) -> list[_Place]:
    computation, name = place
    return [(computation, other.name) for other in computation.users.get(name, ())]


def phase(op_name: str) -> str:
    """forward or backward, by what jax notes of differentiation; "other" outside of it. What the backward pass
    computes again is backward."""
    if "transpose(" in op_name:
        return "backward"
    return "forward" if "jvp(" in op_name else "other"
