"""Serving plans by the share of requests that keep their latencies (the attainment of DistServe, https://arxiv.org/abs/
2401.09670, section 2.2) and not by means: the highest rate of a replica for which, of requests that come at random to
its own scheduler, as many do."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.plan.asked import Say
from shardlm.plan.serving.arrivals import Programs, times_of_requests
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.load import Replica
from shardlm.plan.serving.search import Found, ServingPlan, search
from shardlm.plan.serving.time import Speed

LEAST = 0.01  # of the most: all but idle
EXACT = 1.03  # two rates as near to each other are the same


def search_attained(case: ServingCase, fixed: Mapping[str, int], say: Say) -> Found:
    """As search, for a case with an attainment. Meshes are looked at from the one with most tokens of replies a GPU,
    whatever their latencies, on, as long as one may have more than the best so far within them."""
    free = search(dataclasses.replace(case, ttft_seconds=0.0, itl_seconds=0.0, attainment=0.0), fixed)
    plans: list[ServingPlan] = []
    refused: list[tuple[MeshSpec, str]] = []
    for plan in free.plans:
        best = max((one.tokens_per_second_per_gpu for one in plans), default=0.0)
        if plan.tokens_per_second_per_gpu <= best:
            most = f"{plan.tokens_per_second_per_gpu:,.0f} tokens/s a GPU"
            refused.append(
                (plan.mesh, f"it sustains {most} at most, whatever the latencies, and others more within them")
            )
            continue
        say(f"requests at random on {plan.mesh} ...")
        try:
            plans.append(_attained(plan, case.on(mesh=plan.case.engine.mesh)))
        except ShardlmError as error:
            refused.append((plan.mesh, str(error)))
    if not plans:
        raise ShardlmError(f"no mesh of {case.cluster.num_gpus} {case.cluster.gpu.name} will do: {refused[0][1]}")
    plans.sort(key=lambda plan: (-plan.tokens_per_second_per_gpu, plan.gpus_per_replica))
    return Found(tuple(plans), (*refused, *free.refused))


def _attained(plan: ServingPlan, case: ServingCase) -> ServingPlan:
    """A plan without latencies, at the highest rate that keeps those of the case, and on the replicas that takes.
    Raises ShardlmError where none does."""
    free = Replica.of(plan.case, Speed.of(plan.case, plan.memory))
    replica = dataclasses.replace(free, case=case)
    programs = Programs(replica)

    def times(rate: float) -> dict[str, Any]:
        return times_of_requests(programs, free.at(rate))

    most = plan.most.rate
    if times(most)["within_limits"] < case.attainment:
        alone = times(most * LEAST)
        if alone["within_limits"] < case.attainment:
            raise ShardlmError(_too_slow(case, alone))
        low, high = most * LEAST, most
        while high / low > EXACT:
            middle = math.sqrt(low * high)
            kept = times(middle)["within_limits"] >= case.attainment
            low, high = (middle, high) if kept else (low, middle)
        most = low
    limit = plan.most.limit if most == plan.most.rate else "attainment"
    count = math.ceil(case.request_rate / most) if case.request_rate else case.engine.mesh.data
    usual = free.at(case.request_rate / count if case.request_rate else most)
    most = dataclasses.replace(free.at(most), limit=limit)
    return dataclasses.replace(plan, case=case, most=most, usual=usual, replicas=count)


def _too_slow(case: ServingCase, alone: dict[str, Any]) -> str:
    first, further = alone["ttft_seconds"]["p50"], alone["tpot_seconds"].get("p50", 0.0)
    return (
        f"{case.engine.mesh} gives {alone['within_limits']:.1%} of requests the latencies asked for where hardly any "
        f"run at once, and attainment={case.attainment:g}: half of the first tokens come within {first:.3g} s, further "
        f"ones every {further:.3g} s (estimated). Ask for longer ones"
    )
