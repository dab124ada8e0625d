"""What to change where a served model does not fit: the fewest options of the engine, of equally few those that change
replies least, and then the number of GPUs. By the arithmetic of a plan; serving/answer.py has the plans compiled."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.ops.weight_format import PUBLISHED
from shardlm.plan.cluster import Cluster
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.search import DoesNotFit, fits, meshes, search
from shardlm.plan.serving.weights import held_bytes, weights_of
from shardlm.serving_rules import serving_rules

MOST_GPUS = 1024  # of one replica


@dataclasses.dataclass(frozen=True)
class Change:
    """Something to change, in words, and the case with it, of which some mesh fits."""

    what: str
    case: ServingCase


def changes(case: ServingCase, fixed: Mapping[str, int]) -> Iterator[Change]:
    """Of options, those that another change is a part of are left out."""
    seen: list[dict[str, object]] = []
    choices = list(_choices(case))
    for count in (1, 2, 3):
        for several in itertools.combinations(choices, count):
            options = dict(several)
            longer = any(one.items() <= options.items() for one in seen)
            if len(options) == count and not longer and _some_fit(case.on(**options), fixed):
                seen.append(options)
                yield Change(" and ".join(f"{name}={value}" for name, value in options.items()), case.on(**options))
    more = more_gpus(case, fixed)
    if more:
        yield more


def more_gpus(case: ServingCase, fixed: Mapping[str, int]) -> Change | None:
    """The fewest GPUs of one replica on which it fits as it is, whatever its speed; None above MOST_GPUS."""
    host = case.cluster.gpus_per_host if case.cluster.num_gpus > case.cluster.gpus_per_host else 8
    for count in [*range(1, host + 1), *range(2 * host, MOST_GPUS + 1, host)]:
        if not _may_fit(case, count):
            continue
        there = case.cluster
        here = Cluster.of(there.gpu, count, min(host, count), there.nic_bytes_per_second, there.fabric)
        case_there = dataclasses.replace(case, cluster=here)
        alone = (mesh for mesh in meshes(case, count, fixed) if mesh.data == fixed.get("data", 1))
        if any(fits(case_there.on(mesh=mesh)) for mesh in alone):
            return Change(f"num_gpus={count}", case_there)
    return None


def why_not(case: ServingCase, fixed: Mapping[str, int]) -> str:
    """Why a case has no plan and, where it does not fit, what would make it, estimated; "" where it has one."""
    try:
        search(case, fixed)
    except DoesNotFit as error:
        return told(error, next(changes(case, fixed), None), "estimated", more_gpus(case, fixed))
    except ShardlmError as error:
        return str(error)
    return ""


def told(error: DoesNotFit, change: Change | None, basis: str, more: Change | None) -> str:
    """The error with the change that helps, found as `basis` says, and the fewest GPUs without another."""
    message = str(error)
    if change:
        message += f"; it fits with {change.what} ({basis})"
    if not more:
        return f"{message}; no mesh of up to {MOST_GPUS} GPUs holds it as it is"
    return message if change == more else f"{message}; as it is it needs at least {more.what} (estimated)"


def _choices(case: ServingCase) -> Iterator[tuple[str, object]]:
    """Those that change no reply first, and 16 bits where a checkpoint that names no type would be held in 32."""
    engine, both = case.engine, case.mix.longest
    if engine.gpu_memory_utilization < 0.95:
        yield "gpu_memory_utilization", 0.95
    if case.length > both:
        yield "max_model_len", both
    if case.dtype == "float32":
        yield "dtype", "bfloat16"
    if engine.kv_cache_dtype in ("auto", "bfloat16") and not case.model.shape.compressed:  # serve/entries.py
        yield "kv_cache_dtype", "fp8"
    if case.model.folder and engine.quantization not in (None, PUBLISHED):
        yield "quantization", PUBLISHED
    elif engine.quantization is None:
        yield "quantization", "int8"
    if engine.quantization != "int4":
        yield "quantization", "int4"


def _may_fit(case: ServingCase, count: int) -> bool:
    """Whether so many GPUs have the memory for the weights: most that are asked about do not, and to look at all of
    their meshes took minutes for a model of 20 T parameters."""
    one, shape = case.on(mesh=MeshSpec()), case.model.shape
    weights = weights_of(shape, MeshSpec(), one.dtype, one.weights).stage(slice(None), True, True)
    least = held_bytes(weights, serving_rules(shape, MeshSpec(), one.weights))
    return least <= count * case.cluster.gpu.hbm_bytes * case.engine.gpu_memory_utilization


def _some_fit(case: ServingCase, fixed: Mapping[str, int]) -> bool:
    return _may_fit(case, case.cluster.num_gpus) and any(
        fits(case.on(mesh=mesh)) for mesh in meshes(case, case.cluster.num_gpus, fixed)
    )
