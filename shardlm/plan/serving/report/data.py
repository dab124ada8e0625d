"""A serving answer as plain data, units in the names: what `--format=json` prints, and what text and page are made
from."""

import dataclasses
from typing import Any

from shardlm.ops.weight_format import AsPublished
from shardlm.plan.cluster import Cluster
from shardlm.plan.report.data import cluster_facts
from shardlm.plan.report.placement import placement
from shardlm.plan.serving.answer import RankedServing, ServingAnswer
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.doubt import doubt
from shardlm.plan.serving.load import HEADROOM, Load
from shardlm.plan.serving.report.start import start
from shardlm.plan.serving.search import ServingPlan, pages_text
from shardlm.plan.serving.time import DecodeStep
from shardlm.plan.serving.verify import Program


def to_json(answer: ServingAnswer, most: int = 8) -> dict[str, Any]:
    """All that is said of a case. `most`: plans that are listed; those that were compiled are listed in any case."""
    ranked = list(enumerate(answer.ranked, 1))
    shown = [(rank, one) for rank, one in ranked if rank <= most or one.verified]
    first = answer.first.plan
    case, cluster = first.case, _cluster_of(first)
    asked = ("prompt_len", "output_len", "request_rate", "ttft_seconds", "itl_seconds", "attainment")
    asked += ("range_ratio", "shared_prefix", "file", "images_per_prompt")
    return {
        "model": case.model.name,
        "cluster": cluster_facts(cluster),
        "engine": _engine(first),
        "asked": {"num_gpus": case.cluster.num_gpus} | {name: getattr(case, name) for name in asked},
        "requests": case.mix.told(),
        "images": _images(first),
        "headroom": 1.0 if case.attainment else HEADROOM,
        "unverified": answer.unverified,
        "doubt": doubt(case.model.shape),
        "times_of_requests": answer.times,
        "plans": [{"rank": rank} | _plan(one) for rank, one in shown],
        "plans_left_out": len(ranked) - len(shown),
        "refused": [{"mesh_text": str(mesh), "why": why} for mesh, why in answer.found.refused],
        "start": start(first),
        "placement": placement(first.mesh, cluster),
    }


def _cluster_of(plan: ServingPlan) -> Cluster:
    """The hosts that its replicas take: fewer or more than were asked about where a rate is to be served."""
    cluster = plan.case.cluster
    hosts = -(-plan.num_gpus // cluster.gpus_per_host)
    return dataclasses.replace(cluster, num_gpus=hosts * cluster.gpus_per_host)


def _images(plan: ServingPlan) -> dict[str, Any] | None:
    """Of each prompt; their seconds are estimated."""
    images = plan.case.images
    if images is None:
        return None
    return {
        "per_prompt": images.count,
        "height": images.size[0],
        "width": images.size[1],
        "tokens": images.tokens,
        "patches": images.image.count,
        "program_patches": images.image.patches,
        "encoder_seconds": plan.image_seconds,
    }


def _held(case: ServingCase) -> str:
    """What projections and experts are held in."""
    if isinstance(case.weights, AsPublished):
        return case.weights.text
    return case.dtype if case.weights == "dtype" else case.weights


def _engine(plan: ServingPlan) -> dict[str, Any]:
    case, sizes = plan.case, plan.memory.sizes
    return {
        "dtype": case.dtype,
        "quantization": None if case.weights == "dtype" else str(case.weights),
        "weights": _held(case),
        "adapters": dataclasses.asdict(case.engine.room),
        "kv_cache_dtype": case.dtype if case.engine.kv_cache_dtype == "auto" else case.engine.kv_cache_dtype,
        "max_model_len": case.length,
        "gpu_memory_utilization": case.engine.gpu_memory_utilization,
        "block_size": sizes.page_size,
        "enable_prefix_caching": case.engine.enable_prefix_caching,
        "max_num_seqs": sizes.max_rows,
        "max_num_batched_tokens": sizes.max_batch_tokens,
        "prefill_attention": sizes.prefill,
        "drafts": _drafts(case),
    }


def _drafts(case: ServingCase) -> dict[str, Any] | None:
    asked = case.engine.speculative_config
    if asked is None:
        return None
    return {
        "method": asked.method,
        "model": case.draft.name if case.draft else None,
        "num_speculative_tokens": asked.num_speculative_tokens,
        "acceptance_rate": case.acceptance_rate,
        "tokens_a_step": case.tokens_a_step,
    }


def _plan(one: RankedServing) -> dict[str, Any]:
    """`status` is estimated, verified, or refused with `why`; everything but `compiled` is estimated."""
    plan = one.plan
    memory, most = plan.memory, plan.memory.fullest
    windows = [bool(window) for window in memory.layout.windows]
    split = pages_text(plan.case.engine)
    return {
        "status": one.status,
        "why": one.why,
        "mesh": plan.mesh.sizes(),
        "mesh_text": f"{plan.mesh}{split}",
        "replica_text": f"{dataclasses.replace(plan.mesh, data=1)}{split}",
        "decode_context_parallel_size": plan.case.engine.decode_context_parallel_size,
        "replicas": plan.replicas,
        "gpus_per_replica": plan.gpus_per_replica,
        "num_gpus": plan.num_gpus,
        "estimated": {
            "memory": {
                f"{name}_bytes": getattr(most, name)
                for name in ("weights", "pages", "memories", "slots", "temporaries", "total")
            },
            "memory_limit_bytes": memory.limit,
            "draft_weight_bytes": most.draft,
            "encoder_weight_bytes": most.encoder,
            "num_pages": memory.layout.num_pages,
            "num_snapshots": memory.sizes.snapshots,
            "groups_of_layers": {"all": len(windows), "with_window": sum(windows)},
            "tokens_held": memory.tokens_held,
            "max_concurrency": plan.at_once,
            "decode": [_step(step) for step in plan.decode],
            "decode_with_fused_products": [_step(step) for step in plan.fused],
            "prefill_seconds": plan.prefill,
            "at_most": _load(plan.most, plan.case.mix.output),
            "at_rate": _load(plan.usual, plan.case.mix.output),
            "tokens_per_second_per_gpu": plan.tokens_per_second_per_gpu,
        },
        "compiled": [_program(program) for program in one.verified.programs] if one.verified else None,
        "compile_seconds": one.verified.seconds if one.verified and one.verified.programs else None,
    }


def _step(step: DecodeStep) -> dict[str, Any]:
    return {
        "batch": step.batch,
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "bandwidth_bound_tokens_per_second": step.batch / step.least,
        "share_of_bandwidth_bound": step.of_bound,
        "seconds_by_part": step.parts,
    }


def _load(load: Load, output_len: float) -> dict[str, Any]:
    return {
        "requests_per_second": load.rate,
        "tokens_per_second": load.tokens_per_second(output_len),
        "requests_running": load.running,
        "itl_seconds": load.itl_seconds,
        "ttft_seconds": None if load.ttft_seconds == float("inf") else load.ttft_seconds,  # JSON has no infinity
        "share_of_time_for_prompts": load.prompts,
        "limit": load.limit,
    }


def _program(one: Program) -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in ("what", "rows", "tokens", "stage", "difference")},
        **{f"{name}_bytes": getattr(one, name) for name in ("estimated", "arguments", "temporaries", "total", "sent")},
    }
