"""How often the body of a loop runs: as XLA notes it or, where its passes have lost the note, from its counter."""

import dataclasses
import math
import re
from collections.abc import Callable

from shardlm.hlo.text import Computation, Instruction, Module

_SAME = ("copy", "bitcast", "convert", "reshape")


@dataclasses.dataclass(frozen=True)
class _Linear:
    """counter * `times` + `plus`, where `times` is 0 or 1."""

    times: int
    plus: int


_Reader = Callable[[str], _Linear | None]
"""The name of a scalar -> what it is, if it is linear in the counter."""


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Of the while `loop` in `computation`; None if it is not known: if it ends on anything but a counter that begins
    at a constant, grows by one and is less than another, which the loop may carry."""
    noted = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.attributes)
    if noted:
        return int(noted[1])
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    init = computation.named[loop.operands[0]]
    compared = _compared(module, condition)
    if compared is None or init.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    index, limit, carried = compared
    begins = _reader(module, computation, None)
    if carried is not None:
        kept = _reader(module, body, carried)(body.root.operands[carried]) == _Linear(1, 0)
        limit = begins(init.operands[carried]) if kept else None
    start = begins(init.operands[index])
    step = _reader(module, body, index)(body.root.operands[index])
    if start is None or limit is None or step is None or start.times or step.times != 1 or step.plus < 1:
        return None
    return max(0, math.ceil((limit.plus - start.plus) / step.plus))


def _compared(module: Module, condition: Computation) -> tuple[int, _Linear | None, int | None] | None:
    """(place of the counter in what the loop carries, its limit, the limit's place where the loop carries that)."""
    counter = limit = carried = None
    for index, _ in enumerate(condition.named[_parameter(condition).name].arrays):
        a, b = _less(module, condition, condition.root, _reader(module, condition, index)) or (None, None)
        if a == _Linear(1, 0):
            counter, limit = index, b
        elif b == _Linear(1, 0):
            carried = index
    return None if counter is None or limit is carried is None else (counter, limit, carried)


def _less(module: Module, computation: Computation, at: Instruction, read: _Reader):
    """Both sides of the comparison `a < b` that `at` is, in a fusion or not."""
    if at.opcode == "fusion":
        fused = module.computations[at.called("calls")[0]]
        return _less(module, fused, fused.root, _reader(module, fused, None, [read(name) for name in at.operands]))
    if at.opcode == "compare" and "direction=LT" in at.attributes:
        return read(at.operands[0]), read(at.operands[1])
    return None


def _reader(module: Module, computation: Computation, counter: int | None, arguments: list | None = None) -> _Reader:
    """Reads scalars of `computation`, where the counter is an element of its parameter or `arguments` are given."""

    def read(name: str) -> _Linear | None:
        at = computation.named[name]
        if at.opcode == "constant":
            return _Linear(0, int(at.inside)) if re.fullmatch(r"-?\d+", at.inside) else None
        if at.opcode == "parameter":
            return arguments[int(at.inside)] if arguments else None
        if at.opcode == "get-tuple-element":
            of_loop = computation.named[at.operands[0]].opcode == "parameter" and at.number("index") == counter
            return _Linear(1, 0) if of_loop else None
        if at.opcode == "fusion":
            fused = module.computations[at.called("calls")[0]]
            return _reader(module, fused, None, [read(name) for name in at.operands])(fused.root.name)
        if at.opcode in _SAME:
            return read(at.operands[0])
        if at.opcode == "add":
            a, b = map(read, at.operands)
            return _Linear(a.times + b.times, a.plus + b.plus) if a and b else None
        return None

    return read


def _parameter(computation: Computation) -> Instruction:
    return next(at for at in computation.instructions if at.opcode == "parameter")
