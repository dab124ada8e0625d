"""Walks the instructions that a program runs, each with how often: through loops, calls, fusions, branches and
asynchronous wrappers."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardlm.hlo.text import Computation, Instruction, Module

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction as it is reached from the entry.

    count   times it runs in one run of the program
    depth   loops around it
    guess   why the count is not certain; "" if it is
    caller  the instruction that calls its computation; None in the entry
    """

    instruction: Instruction
    computation: Computation
    count: int
    depth: int
    guess: str
    caller: "Visit | None"


def collect(module: Module, find: Callable[[Visit], Sequence[T]], weigh: Callable[[Sequence[T]], float]) -> list[T]:
    """What `find` gives for each instruction that runs, in order. Of a conditional, the branch that weighs most."""

    def run(name: str, count: int, depth: int, guess: str, caller: Visit | None) -> list[T]:
        computation, found = module.computations[name], []
        for instruction in computation.instructions:
            visit = Visit(instruction, computation, count, depth, guess, caller)
            found += find(visit)
            found += inside(visit)
        return found

    def inside(visit: Visit) -> list[T]:
        at, count, depth, guess = visit.instruction, visit.count, visit.depth, visit.guess
        if at.opcode == "while":
            trips = trip_count(module, visit)
            if trips is None:
                trips, guess = 1, "a loop of unknown length, counted once"
            (condition,), (body,) = at.called("condition"), at.called("body")
            found = run(condition, count * (trips + 1), depth + 1, guess, visit)
            return found + (run(body, count * trips, depth + 1, guess, visit) if trips else [])
        if at.opcode == "conditional":
            names = [name for key in _BRANCHES for name in at.called(key)]
            branches = [run(name, count, depth, "the costliest branch of a conditional", visit) for name in names]
            return max(branches, key=weigh)
        if at.opcode.endswith(("-done", "-update")):
            return []  # its -start is what runs
        names = at.called("calls") + at.called("called_computations")
        names += at.called("to_apply") if at.opcode in ("call", "async-start", "call-start") else ()
        return [item for name in names for item in run(name, count, depth, guess, visit)]

    return run(module.entry, 1, 0, "", None)


_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def trip_count(module: Module, loop: Visit) -> int | None:
    """How often a while loop's body runs: as XLA notes it, or from its induction variable; None if not known."""
    noted = re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.instruction.attributes)
    if noted:
        return int(noted[1])
    condition = module.computations[loop.instruction.called("condition")[0]]
    body = module.computations[loop.instruction.called("body")[0]]
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    variable, limit = (condition.named[name] for name in compare.operands)
    index = variable.number("index") if variable.opcode == "get-tuple-element" else None
    init = loop.computation.named[loop.instruction.operands[0]]
    if index is None or init.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    start = loop.computation.named[init.operands[index]]
    step = body.named[body.root.operands[index]]
    if step.opcode != "add":
        return None
    steps = [_constant(body.named[name]) for name in step.operands]
    own = [name for name in step.operands if body.named[name].number("index") == index]
    ends = _constant(start), _constant(limit), next((s for s in steps if s), None)
    if not own or None in ends:
        return None
    return max(0, -(-(ends[1] - ends[0]) // ends[2]))


def _constant(instruction: Instruction) -> int | None:
    whole = re.fullmatch(r"-?\d+", instruction.inside) if instruction.opcode == "constant" else None
    return int(whole[0]) if whole else None
