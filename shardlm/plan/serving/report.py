"""A serving plan as text and as JSON. Every figure is estimated, but those of a program that was compiled."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardlm.plan.serving.load import HEADROOM, Load
from shardlm.plan.serving.search import Found, ServingPlan
from shardlm.plan.serving.verify import Program, VerifiedServing

GIB = 2**30


def format_serving(plan: ServingPlan, verified: VerifiedServing | None = None) -> str:
    """For a person."""
    sections = [_head(plan), _memory(plan), _speed(plan), _rates(plan)]
    nothing = "all figures are estimated; nothing was compiled"
    sections.append(_compiled(plan, verified) if verified else nothing)
    return "\n\n".join(sections)


def format_found(found: Found, most: int = 8) -> str:
    """The best meshes of a search, and why others are not among them."""
    rows = [("mesh of a replica", "GPUs", "requests/s", "tokens/s/GPU", "between tokens", "limited by")]
    for plan in found.plans[:most]:
        own = dataclasses.replace(plan.case.engine.mesh, data=1)
        rate, each = plan.most.rate, plan.tokens_per_second_per_gpu
        gap = _seconds(plan.most.itl_seconds)
        rows.append((str(own), plan.gpus_per_replica, f"{rate:.3g}", f"{each:,.0f}", gap, plan.most.limit))
    lines = ["meshes by tokens of replies (estimated), each replica at the most it sustains:", *_table(rows)]
    if found.refused:
        lines.append(f"{len(found.refused)} more do not do, for instance {found.refused[0][0]}: {found.refused[0][1]}")
    return "\n".join(lines)


def _head(plan: ServingPlan) -> str:
    case, engine = plan.case, plan.case.engine
    held = engine.quantization or case.dtype
    return (
        f"{case.model.name} on {plan.num_gpus} {case.cluster.gpu.name}: {_replicas(plan)} of {plan.gpus_per_replica} "
        f"({plan.mesh})\nweights {held}, keys and values {engine.kv_cache_dtype}, max_model_len {case.length:,}, "
        f"prompts of {case.prompt_len:,} tokens, replies of {case.output_len:,}"
    )


def _replicas(plan: ServingPlan) -> str:
    return "1 replica" if plan.replicas == 1 else f"{plan.replicas} replicas"


def _memory(plan: ServingPlan) -> str:
    memory = plan.memory
    most, sizes = memory.fullest, memory.sizes
    rows = [
        ("weights", _gib(most.weights), ""),
        ("pages", _gib(most.pages), f"{memory.layout.num_pages:,} of {sizes.page_size} tokens"),
        ("slots", _gib(most.slots), f"{sizes.max_rows:,} requests (max_num_seqs)"),
        ("temporaries", _gib(most.temporaries), "of the program that needs most (estimated)"),
        ("together", _gib(most.total), f"of {memory.limit / GIB:.1f} GiB that jax may take"),
    ]
    windows = sum(map(bool, memory.layout.windows))
    groups = f", {windows} of {len(memory.layout.windows)} groups of layers with a window" if windows else ""
    return "\n".join(
        [
            "memory a GPU, as the engine allocates it:",
            *_table(rows),
            f"tokens held by a replica: {memory.tokens_held:,}{groups}",
            f"requests of these lengths at once: {plan.at_once:,} a replica, none of them preempted",
        ]
    )


def _speed(plan: ServingPlan) -> str:
    rows = [("batch", "between tokens", "tokens/s", "of the bandwidth bound", "most of it")]
    for step in plan.decode:
        parts = sorted(step.parts.items(), key=lambda part: -part[1])[:3]
        what = ", ".join(f"{name} {seconds / step.seconds:.0%}" for name, seconds in parts)
        rate = f"{step.tokens_per_second:,.0f}"
        rows.append((step.batch, _seconds(step.seconds), rate, f"{step.of_bound:.0%}", what))
    return "\n".join(
        [
            "decoding of a replica (estimated), by requests at once:",
            *_table(rows),
            f"time to the first token of an idle replica (estimated): {_seconds(plan.prefill)}",
        ]
    )


def _rates(plan: ServingPlan) -> str:
    case, usual = plan.case, plan.usual
    first, gap = _seconds(usual.ttft_seconds), _seconds(usual.itl_seconds)
    lines = [
        f"a replica sustains at most {plan.most.rate:.3g} requests/s (estimated), limited by {plan.most.limit}",
        f"at {usual.rate:.3g} requests/s each (estimated): mean time to the first token {first}, between tokens {gap}, "
        f"{usual.running:.0f} requests running, {usual.prompts:.0%} of the time for prompts",
    ]
    if case.request_rate:
        lines.append(
            f"for {case.request_rate:g} requests/s: {_replicas(plan)}, {plan.num_gpus} GPUs, each at no more than "
            f"{HEADROOM:.0%} of what it sustains"
        )
    return "\n".join(lines)


def _compiled(plan: ServingPlan, verified: VerifiedServing) -> str:
    rows = [("program", "rows x tokens", "stage", "arguments", "temporaries", "estimated together", "difference")]
    for one in verified.programs:
        sizes = (_gib(one.arguments), _gib(one.temporaries), _gib(one.estimated))
        rows.append((one.what, f"{one.rows} x {one.tokens}", one.stage, *sizes, f"{one.difference:+.1%}"))
    verdict = "they fit" if verified.fits(plan.memory.limit) else "they do NOT fit"
    lines = [f"compiled for {plan.case.cluster.gpu.name} in {verified.seconds:.0f} s; {verdict}:", *_table(rows)]
    for one in verified.programs:
        for axes, kinds in one.sent.items():
            sent = ", ".join(f"{kind} {nbytes / 2**20:.2f} MiB" for kind, nbytes in kinds.items())
            lines.append(f"{one.what} {one.rows} x {one.tokens} sends over {axes} (compiled): {sent}")
    return "\n".join(lines)


def to_json(plan: ServingPlan, verified: VerifiedServing | None = None) -> dict[str, Any]:
    """For a program; seconds and bytes in plain units."""
    case, memory = plan.case, plan.memory
    most = memory.fullest
    estimated = {
        "memory": {name: getattr(most, name) for name in ("weights", "pages", "slots", "temporaries", "total")},
        "memory_limit": memory.limit,
        "num_pages": memory.layout.num_pages,
        "block_size": memory.sizes.page_size,
        "tokens_held": memory.tokens_held,
        "max_concurrency": plan.at_once,
        "decode": [_step(step) for step in plan.decode],
        "prefill_seconds": plan.prefill,
        "at_most": _load(plan.most, case.output_len),
        "at_rate": _load(plan.usual, case.output_len),
        "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
    }
    asked = ("prompt_len", "output_len", "request_rate", "ttft_seconds", "itl_seconds")
    return {
        "model": case.model.name,
        "gpu": case.cluster.gpu.name,
        "num_gpus": plan.num_gpus,
        "replicas": plan.replicas,
        "mesh": plan.mesh.sizes(),
        "engine": {
            "dtype": case.dtype,
            "quantization": case.engine.quantization,
            "kv_cache_dtype": case.engine.kv_cache_dtype,
            "max_model_len": case.length,
            "gpu_memory_utilization": case.engine.gpu_memory_utilization,
            "max_num_seqs": memory.sizes.max_rows,
            "max_num_batched_tokens": memory.sizes.max_batch_tokens,
        },
        "asked": {name: getattr(case, name) for name in asked},
        "estimated": estimated,
        "compiled": None if verified is None else [_program(one) for one in verified.programs],
    }


def _step(step) -> dict[str, Any]:
    return {
        "batch": step.batch,
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "of_bandwidth_bound": step.of_bound,
        "parts": step.parts,
    }


def _load(load: Load, output_len: int) -> dict[str, Any]:
    found = dataclasses.asdict(load) | {"tokens_per_second": load.tokens_per_second(output_len)}
    found["ttft_seconds"] = None if load.ttft_seconds == float("inf") else load.ttft_seconds  # JSON has no infinity
    return found


def _program(one: Program) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"total": one.total, "difference": one.difference}


def _gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _table(rows: Sequence[Sequence[Any]]) -> list[str]:
    text = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return ["  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in text]
