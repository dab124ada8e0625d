"""A sweep of serving as text and as plain data. All figures are estimates."""

import textwrap
from typing import Any

from shardlm.hardware import GIB
from shardlm.plan.columns import columns, three_digits
from shardlm.plan.serving.load import HEADROOM
from shardlm.plan.serving.report.tables import requests
from shardlm.plan.serving.search import ServingPlan, mesh_text
from shardlm.plan.serving.sweep import Row, ServingSweep

WIDTH = 120
HEAD = ("requests/s", "tokens/s a GPU", "first token s", "next s", "each", "replicas", "GPUs", "GiB", "limited by")


def to_text(sweep: ServingSweep) -> str:
    """A line for each value, and under the table why there is no plan where there is none."""
    head = (sweep.field, *HEAD, "mesh of a replica")
    lines = [[row.asked.value, *(_line(row.plan) if row.plan else ["-"])] for row in sweep.rows]
    notes = [f"{sweep.field}={row.asked.value}: {' '.join(row.why.split())}" for row in sweep.rows if not row.plan]
    table = columns(head, lines, left=(0, len(head) - 2, len(head) - 1))
    return "\n".join([table, "", *(textwrap.fill(one, WIDTH) for one in [*notes, _footnote(sweep)])])


def _line(plan: ServingPlan) -> list[str]:
    return [
        three_digits(plan.usual.rate * plan.replicas),
        three_digits(plan.tokens_per_second_per_gpu),
        three_digits(plan.usual.ttft_seconds),
        three_digits(plan.usual.itl_seconds),
        str(plan.gpus_per_replica),
        f"{plan.replicas:,}",
        f"{plan.num_gpus:,}",
        f"{plan.memory.fullest.total / GIB:.1f}",
        plan.most.limit,
        mesh_text(plan.case.engine),
    ]


def _footnote(sweep: ServingSweep) -> str:
    case, shares = sweep.rows[0].asked.case, {row.asked.case.attainment for row in sweep.rows}
    planned = f"Replicas are planned with {HEADROOM:.0%} of what limits them"
    if shares != {0.0}:
        share = f"{case.attainment:.4g}" if len(shares) == 1 else "the share asked for"
        planned = f"Replicas are planned with as many requests, which come at random, as leave {share} of them in time"
    alike = {str(row.asked.case.mix.told()) for row in sweep.rows}
    asked = {"shared_prefix": case.shared_prefix, "file": case.file}
    what = f", {requests(asked, case.mix.told(), case.engine.enable_prefix_caching)}" if len(alike) == 1 else ""
    return (
        f"All estimated, of {case.model.name}{what}, in {sweep.seconds:.0f} s. {planned}; tokens/s a GPU are of "
        "replies, at the most that a replica sustains, first token and next the means at the rate that is planned."
    )


def to_json(sweep: ServingSweep) -> dict[str, Any]:
    return {"field": sweep.field, "rows": [_row(row) for row in sweep.rows], "seconds": round(sweep.seconds, 1)}


def _row(row: Row) -> dict[str, Any]:
    case, plan = row.asked.case, row.plan
    given = {
        "value": row.asked.value,
        "gpu": case.cluster.gpu.name,
        "requests": case.mix.told(),
        "attainment": case.attainment or None,
        "fits": plan is not None,
    }
    if plan is None:
        return given | {"why": row.why}
    return given | {
        "status": "estimated",
        "mesh": {axis: plan.case.engine.mesh.size(axis) for axis in ("tensor", "expert", "pipeline")},
        "replicas": plan.replicas,
        "gpus_per_replica": plan.gpus_per_replica,
        "num_gpus": plan.num_gpus,
        "most_requests_per_second": plan.most.rate,
        "limited_by": plan.most.limit,
        "requests_per_second": plan.usual.rate * plan.replicas,
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        "ttft_seconds": plan.usual.ttft_seconds,
        "itl_seconds": plan.usual.itl_seconds,
        "hbm_bytes": plan.memory.fullest.total,
    }
