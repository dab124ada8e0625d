"""Layers without a loop over them (RunConfig.unroll=0), looked at last: the best plan that was compiled is compiled so
too, and the quicker of both programs is taken. What layers keep is then not copied into stacks and out of them, most of
which is products that remat=dots keeps. Such a program takes longer to compile, and the search itself has none."""

import dataclasses
from collections.abc import Sequence

from shardlm.plan.asked import Say
from shardlm.plan.constraints import Constraints
from shardlm.plan.plan import Plan
from shardlm.plan.ranked import Ranked
from shardlm.plan.verify import verify

MOST = 32  # layers: programs of 8 and 16 were compared, and compiling takes as much longer as there are


def refined(ranked: Sequence[Ranked], constraints: Constraints, say: Say) -> tuple[Ranked, ...]:
    """The ranked plans, before them the first one without its loop where that was looked at, fits and is quicker, all
    as compiled. That it was looked at is told to `say`."""
    if not ranked or (plan := _unrolled(ranked[0], constraints)) is None:
        return tuple(ranked)
    say(f"compiling {plan.config.mesh} without a loop over its layers ...")
    one = Ranked(plan, verify([plan])[0])
    if one.verified.failure or not one.fits:
        say("it does not fit, and the loop stays")
        return tuple(ranked)
    if one.step_seconds >= ranked[0].step_seconds:
        say(f"its step takes {one.step_seconds:.4g} s, with the loop {ranked[0].step_seconds:.4g} s, which stays")
        return tuple(ranked)
    return (one, *ranked)


def _unrolled(first: Ranked, constraints: Constraints) -> Plan | None:
    """None where it is not known to be worth it: with other policies than dots, in stages, for so many layers, and
    where the configuration or the constraints say how layers are looped over."""
    config = first.plan.config
    worth = config.remat == "dots" and config.mesh.pipeline == 1 and first.plan.sketch.shape.num_layers <= MOST
    if not first.program or not first.fits or not worth or config.unroll != 1 or not constraints.allow("unroll", 0):
        return None
    return Plan.of(dataclasses.replace(config, unroll=0), first.plan.cluster, images=first.plan.sketch.images)
