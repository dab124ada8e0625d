"""A sweep as text and as plain data. All figures are estimates."""

import textwrap
from typing import Any

from shardlm.hardware import GIB
from shardlm.plan.columns import columns, dollars, large, percent, rounded, three_digits
from shardlm.plan.local import provenance
from shardlm.plan.report.figures import called
from shardlm.plan.search import settings
from shardlm.plan.shares import described, limited_by, shares
from shardlm.plan.sweep import CLUSTER, GPU, NUM_GPUS, Row, Sweep

WIDTH = 120


def to_json(sweep: Sweep) -> dict[str, Any]:
    return {
        "field": sweep.over.field,
        "measured": _measured(sweep),
        "rows": [_row(row) for row in sweep.rows],
        "considered": sum(row.considered for row in sweep.rows),
        "seconds": round(sweep.seconds, 1),
    }


def _measured(sweep: Sweep) -> list[str]:
    """Where the rates are from, of the most GPUs; nothing where they are the table's."""
    return provenance(max((row.case.cluster for row in sweep.rows), key=lambda cluster: cluster.num_gpus))


def _row(row: Row) -> dict[str, Any]:
    case, plan = row.case, row.plan
    train = case.config.train
    given: dict[str, Any] = {
        "value": case.value,
        "gpu": case.cluster.gpu.name,
        "num_gpus": case.cluster.num_gpus,
        "global_batch": train.global_batch,
        "seq_len": train.seq_len,
        "tokens": case.budget.tokens,
        "fits": plan is not None,
    }
    if plan is None:
        return given | {"why": row.why, "change": row.change and row.change.what}
    price = case.budget.dollars_per_gpu_hour
    return given | {
        "status": "estimated",
        "settings": settings(plan.config),
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.cost.tokens_per_second,
        "tokens_per_second_per_gpu": plan.cost.tokens_per_second / case.cluster.num_gpus,
        "mfu": plan.mfu,
        "hbm_bytes": plan.memory.total,
        "gpu_hbm_bytes": case.cluster.gpu.hbm_bytes,
        "days": case.budget.days(plan),
        "dollars_per_gpu_hour": price or None,
        "price_source": case.budget.price_source or None,
        "dollars": case.budget.dollars(plan) if price else None,
        "shares": shares(plan),
        "limited_by": limited_by(plan),
    }


def to_text(sweep: Sweep) -> str:
    """A line for each value, and under the table what would fit where nothing does."""
    field = sweep.over.field
    head = [
        field,
        "step s",
        "tokens/s",
        "a GPU",
        "MFU",
        "GiB",
        "days",
        "dollars",
        "most of a step",
        "mesh, settings",
    ]
    batches = {row.case.config.train.global_batch for row in sweep.rows}
    if len(batches) > 1 and field != "train.global_batch":
        head.insert(1, "batch")
    lines, notes = [], []
    for row in sweep.rows:
        if row.plan is None:
            lines.append([row.case.value, "-"])
            notes.append(_note(field, row))
            continue
        line = _line(row)
        if "batch" in head:
            line.insert(1, f"{row.case.config.train.global_batch:,}")
        lines.append(line)
    table = columns(head, lines, left=(0, len(head) - 2, len(head) - 1))
    said = [*notes, *_footnotes(sweep)]
    told = "\n".join([table, "", *(textwrap.fill(one, WIDTH) for one in said)])
    return called(told, sweep.rows[0].case.cluster.device)


def _line(row: Row) -> list[str]:
    case, plan = row.case, row.plan
    rate = plan.cost.tokens_per_second
    return [
        case.value,
        three_digits(plan.step_seconds),
        three_digits(rate),
        three_digits(rate / case.cluster.num_gpus),
        percent(plan.mfu, 1),
        f"{plan.memory.total / GIB:.1f}",
        three_digits(case.budget.days(plan)),
        dollars(case.budget.dollars(plan)) if case.budget.dollars_per_gpu_hour else "-",
        limited_by(plan),
        described(plan),
    ]


def _note(field: str, row: Row) -> str:
    change = f"; it fits with {row.change.what} (estimated)" if row.change else ""
    return f"{field}={row.case.value}: {' '.join(row.why.split())}{change}"


def _footnotes(sweep: Sweep) -> list[str]:
    first = sweep.rows[0].case
    train, field = first.config.train, sweep.over.field
    rows = {row.case.config.train.global_batch for row in sweep.rows}
    batch = f"{train.global_batch:,} rows" if len(rows) == 1 else "as in the table"
    lengths = {row.case.config.train.seq_len for row in sweep.rows}
    length = f" of {train.seq_len:,} tokens" if len(lengths) == 1 else ""
    where = "" if field in (NUM_GPUS, GPU, CLUSTER) else f" on {first.cluster.num_gpus:,} x {first.cluster.gpu.name}"
    considered = sum(row.considered for row in sweep.rows)
    sources = {
        f"{row.case.cluster.gpu.name} ${rounded(row.case.budget.dollars_per_gpu_hour, 2)} "
        f"({row.case.budget.price_source})"
        for row in sweep.rows
        if row.case.budget.dollars_per_gpu_hour
    }
    prices = f" A GPU-hour: {'; '.join(sorted(sources))}." if sources else ""
    return [
        f"All estimated{where}: the best of {considered:,} configurations, in {sweep.seconds:.1f} s. "
        f"Global batch {batch}{length}; days and dollars are of {large(first.budget.tokens)} tokens.{prices}",
        *_few_rows(sweep),
        *(f"{sentence[0].upper()}{sentence[1:]}." for sentence in _measured(sweep)),
    ]


def _few_rows(sweep: Sweep) -> list[str]:
    """What makes more GPUs no faster, and what to sweep then."""
    crowded = [n for row in sweep.rows if (n := row.case.cluster.num_gpus) > row.case.config.train.global_batch]
    if not crowded or sweep.over.field == "train.global_batch":
        return []
    scaled = ", or --scale_batch" if sweep.over.field == NUM_GPUS else ""
    return [
        f"There are fewer rows than GPUs, from {min(crowded):,} on, so that several share each; more rows, by "
        f"--config.train.global_batch{scaled}, use them better."
    ]
