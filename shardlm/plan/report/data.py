"""An answer as plain data, units in the names: what `--format=json` prints, and what text and page are made from."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from shardlm.mesh import crossing_axes
from shardlm.plan.answer import Answer
from shardlm.plan.budget import Budget
from shardlm.plan.change import Change
from shardlm.plan.cluster import Cluster, Group
from shardlm.plan.local import provenance
from shardlm.plan.measured import route_of
from shardlm.plan.plan import Plan
from shardlm.plan.ranked import Ranked, speed
from shardlm.plan.report.placement import placement
from shardlm.plan.report.stages import stages
from shardlm.plan.report.step import (
    bill,
    communication,
    compiled_communication,
    compiled_step,
    compute,
    memory,
    timeline,
)

Sweep = Iterable[tuple[int, float, bool]]
NOTHING: Mapping[str, str] = MappingProxyType({})


def to_json(
    answer: Answer,
    name: str = "",
    sweep: Sweep = (),
    most: int = 12,
    overrides: Mapping[str, str] = NOTHING,
) -> dict[str, Any]:
    """All that is said of a configuration called `name`.

    sweep  (number of GPUs, tokens/s of the best plan, whether it fits), for throughput against the number of GPUs
    overrides  of its fields, by path, as text
    most   plans that are listed; those that were compiled are listed in any case
    """
    ranked = list(enumerate(answer.ranked, 1))
    shown = [(rank, one) for rank, one in ranked if rank <= most or one.verified]
    best = answer.best
    return {
        "config": name,
        "overrides": dict(overrides),
        "cluster": cluster_facts(answer.cluster),
        "run": _run(_any_plan(answer), answer.budget),
        "constraints": [str(one) for one in answer.constraints.items],
        "search": _search(answer),
        "unverified": answer.unverified,
        "plans": [_summary(one, answer.budget) | {"rank": rank} for rank, one in shown],
        "plans_left_out": len(ranked) - len(shown),
        "first": _details(best) if best else None,
        "shortfall": None if best else _shortfall(answer),
        "changes": [_change(one, answer.budget) for one in answer.changes],
        "sweep": _sweep(answer, sweep),
        "images": _images(best) if best and best.plan.sketch.images else None,
    }


def _images(best: Ranked) -> dict[str, Any]:
    """What those of each row have of the first plan, estimated."""
    images = best.plan.sketch.images
    return {
        "per_row": images.count,
        "size": list(images.size),
        "tokens_each": images.tokens,
        **dataclasses.asdict(images.added(best.plan.sketch)),
    }


def _sweep(answer: Answer, sweep: Sweep) -> list[dict[str, Any]]:
    """With the first plan at its own number of GPUs: what the formulas rank first there may have been refused."""
    own = {answer.cluster.num_gpus: answer.best.plan.cost.tokens_per_second} if answer.best else {}
    return [{"num_gpus": n, "tokens_per_second": own.get(n, rate), "fits": fits} for n, rate, fits in sweep]


def _any_plan(answer: Answer) -> Plan:
    plan = answer.ranked[0].plan if answer.ranked else answer.found.smallest
    assert plan is not None  # a search without either has raised
    return plan


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    gpu = cluster.gpu
    return {
        "gpu": gpu.name,
        "device": cluster.device,
        "num_gpus": cluster.num_gpus,
        "gpus_per_host": cluster.gpus_per_host,
        "num_hosts": cluster.num_gpus // cluster.gpus_per_host,
        "gpus_per_island": cluster.island,
        "inside_link": route_of(Group(2, 2), cluster).name,
        "inside_bytes_per_second": cluster.inside_bytes_per_second,
        "network_bytes_per_second": cluster.nic_bytes_per_second,
        "fabric": cluster.fabric,
        "memory_bytes": gpu.hbm_bytes,
        "memory_bytes_per_second": gpu.hbm_bytes_per_second,
        "peak_bf16_flops_per_second": gpu.peak.bf16,
        "measured": provenance(cluster),
    }


def _run(plan: Plan, budget: Budget) -> dict[str, Any]:
    """What is the same in every plan."""
    config = plan.config
    return {
        "parameters": plan.sketch.parameters,
        "adapter_parameters": plan.sketch.adapters,
        "global_batch": config.train.global_batch,
        "seq_len": config.train.seq_len,
        "tokens_per_step": plan.cost.tokens,
        "model_flops_per_step": plan.cost.model_flops,
        "precision": config.precision,
        "optimizer": config.optim.name,
        "tokens": budget.tokens,
        "dollars_per_gpu_hour": budget.dollars_per_gpu_hour,
        "price_source": budget.price_source,
    }


def _search(answer: Answer) -> dict[str, Any]:
    found = answer.found
    return {
        "considered": found.considered,
        "too_large": found.too_large,
        "meshes": len(found.plans),
        "seconds": answer.search_seconds,
        "impossible": [{"reason": reason, "count": count} for reason, count in found.refused.items()],
    }


def _summary(one: Ranked, budget: Budget) -> dict[str, Any]:
    """A plan in one row. `status` is estimated, verified, or refused with `why`. Speed, days and dollars are there by
    the formulas and by the compiled program where there is one; `basis` says which of the two the plan goes by."""
    plan, checked = one.plan, one.verified
    status, why = "estimated", ""
    if checked:
        status = "verified" if one.fits else "refused"
        why = checked.failure or ("" if one.fits else "its program needs more memory than a GPU has")
    made = {"memory_bytes": checked.hbm_bytes + plan.memory.reserve} if one.program else None
    return _settings(plan) | {
        "status": status,
        "why": why,
        "fits": one.fits,
        "basis": one.basis,
        "estimated": speed(one, budget, "estimated") | {"memory_bytes": plan.memory.total},
        "compiled": made and speed(one, budget, "compiled") | made,
        "limited_by": one.limit,
        "timeline": timeline(plan),
        "hidden_communication_seconds": plan.cost.hidden_seconds,
        "memory": memory(plan, checked),
        "compiled_step": compiled_step(checked),
        "compile_seconds": checked.compile_seconds if one.program else None,
    }


def _settings(plan: Plan) -> dict[str, Any]:
    config, sketch = plan.config, plan.sketch
    pipelined = config.mesh.pipeline > 1
    return {
        "mesh": config.mesh.sizes(),
        "mesh_text": str(config.mesh),
        "crossing_axes": list(crossing_axes(config.mesh, plan.cluster.island)),
        "rules": config.rules,
        "remat": config.remat,
        "matmul": config.matmul,
        "unroll": config.unroll,
        "schedule": config.pipeline.schedule if pipelined else "",
        "rounds": sketch.schedule.rounds if pipelined else 1,
        "microbatches": sketch.passes,
        "rows_per_microbatch": sketch.rows,
        "offload": [name for name in ("optimizer", "params") if getattr(config.offload, name)],
        "moments": config.optim.moments,
    }


def _details(one: Ranked) -> dict[str, Any]:
    """Of the first plan, beyond its row."""
    plan = one.plan
    return {
        "communication": communication(plan),
        "compiled_communication": compiled_communication(one.verified),
        "compute": compute(plan),
        "bubble_seconds": plan.cost.bubble_seconds,
        "bill": bill(plan, one.verified),
        "placement": placement(plan.config.mesh, plan.cluster),
        "stages": stages(plan),
    }


def _shortfall(answer: Answer) -> dict[str, Any]:
    """Of what does not fit, the plan that needs least, as compiled where that was looked at."""
    if answer.ranked:
        one = min(answer.ranked, key=_needed)
    else:
        one = Ranked(_any_plan(answer))
    over = _needed(one) - one.plan.gpu.hbm_bytes
    return _summary(one, answer.budget) | {"over_bytes": max(0.0, over)}


def _needed(one: Ranked) -> float:
    if one.verified and not one.verified.failure:
        return one.verified.hbm_bytes + one.plan.memory.reserve
    return one.plan.memory.total


def _change(change: Change, budget: Budget) -> dict[str, Any]:
    cluster = change.plan.cluster
    return {"change": change.what, "gpu": cluster.gpu.name, "num_gpus": cluster.num_gpus} | _summary(
        change.ranked, budget
    )
