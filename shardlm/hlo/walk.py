"""Walks the instructions that a program runs, each with how often: through loops, calls, fusions, branches and
asynchronous wrappers."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from shardlm.hlo.text import Computation, Instruction, Module
from shardlm.hlo.trips import trip_count

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
            trips = trip_count(module, visit.computation, at)
            if trips is None:
                trips, guess = 1, "a loop of unknown length, counted once"
            (condition,), (body,) = at.called("condition"), at.called("body")
            found = run(condition, count * (trips + 1), depth + 1, guess, visit)
            return found + (run(body, count * trips, depth + 1, guess, visit) if trips else [])
        if at.opcode == "conditional":
            names, why = branches(module, at), "the costliest branch of a conditional"
            branches_run = [run(name, count, depth, why, visit) for name in names]
            return max(branches_run, key=weigh)
        if at.opcode.endswith(("-done", "-update")):
            return []  # its -start is what runs
        names = at.called("calls") + at.called("called_computations")
        names += at.called("to_apply") if at.opcode in ("call", "async-start", "call-start") else ()
        return [item for name in names for item in run(name, count, depth, guess, visit)]

    return run(module.entry, 1, 0, "", None)


def branches(module: Module, at: Instruction) -> list[str]:
    """The computations of a conditional. Of ways to attend without those that call cuDNN in a loop, for documents a few
    rows at a time (ops/cudnn_groups.py): a program does not show how little these compute, and the others show what
    whole rows do. Where no other calls it, such a loop is one over layers."""
    names = [name for key in _BRANCHES for name in at.called(key)]
    at_once = [name for name in names if not _attends_in_a_loop(module, name)]
    return at_once if any(_attends(module.computations[name]) for name in at_once) else names


def _attends(computation: Computation) -> bool:
    return any("__cudnn$fmha" in at.attributes for at in computation.instructions)


def _attends_in_a_loop(module: Module, name: str) -> bool:
    loops = [at for at in module.computations[name].instructions if at.opcode == "while"]
    return any(_attends(module.computations[body]) for at in loops for body in at.called("body"))


_BRANCHES = ("branch_computations", "true_computation", "false_computation")
