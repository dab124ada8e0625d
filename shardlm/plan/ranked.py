"""A plan beside what compiling it showed. What it says of a step's time is the program's where there is one, else the
formulas'; `basis` says which."""

import dataclasses
from typing import Literal

from shardlm.flops import mfu
from shardlm.plan.bill import CompiledStep
from shardlm.plan.budget import Budget
from shardlm.plan.plan import Plan
from shardlm.plan.verify import Verified

Basis = Literal["estimated", "compiled"]


@dataclasses.dataclass(frozen=True)
class Ranked:
    """A plan, and what compiling it showed: None where it was not compiled."""

    plan: Plan
    verified: Verified | None = None

    @property
    def fits(self) -> bool:
        """As compiled where it was, with the same reserve; not where there is no program; else as estimated."""
        if self.verified is None:
            return self.plan.fits
        return (
            not self.verified.failure and self.verified.hbm_bytes + self.plan.memory.reserve <= self.plan.gpu.hbm_bytes
        )

    @property
    def program(self) -> CompiledStep | None:
        """The compiled step; None where there is none."""
        return self.verified.step if self.verified else None

    @property
    def basis(self) -> Basis:
        return "compiled" if self.program else "estimated"

    @property
    def step_seconds(self) -> float:
        return self.seconds(self.basis)

    def seconds(self, basis: Basis) -> float:
        """Of a step by one of the two; by a program only where there is one, which images are read before."""
        if basis == "compiled":
            return self.program.step_seconds + self.plan.cost.image_seconds
        return self.plan.step_seconds

    @property
    def limit(self) -> str:
        """What takes most of the step. Of a program its own exposed communication; kernels, of which it is known how
        long they take together, are told apart as in the formulas."""
        cost, program = self.plan.cost, self.program
        if program is None:
            return cost.limit
        links = {"+".join(row.axes): row.link for row in program.rows}
        exposed = [(axes, links[axes], seconds) for axes, seconds in program.exposed.items()]
        busy = program.compute_seconds + program.contention_seconds + cost.image_seconds
        return cost.limited_by(busy, exposed)


def speed(one: Ranked, budget: Budget, basis: Basis) -> dict[str, float | None]:
    """What follows from a step's time by one of the two; None for what the budget does not know."""
    plan, seconds = one.plan, one.seconds(basis)
    return {
        "step_seconds": seconds,
        "tokens_per_second": plan.cost.tokens / seconds,
        "mfu": mfu(plan.cost.model_flops, seconds, plan.gpu.peak.bf16, plan.cluster.num_gpus),
        "days": budget.days(plan, seconds) if budget.tokens else None,
        "dollars": budget.dollars(plan, seconds) if budget.tokens and budget.dollars_per_gpu_hour else None,
    }
