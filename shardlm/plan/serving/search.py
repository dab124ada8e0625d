"""The plan of a serving engine: its memory, pages, times and rates on one mesh, and the best mesh for a cluster.
Estimates, by formulas; serving/verify.py compiles."""

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.fused import planned, possible
from shardlm.plan.serving.load import HEADROOM, Load, Replica
from shardlm.plan.serving.memory import ServingMemory, serving_memory
from shardlm.plan.serving.time import DecodeStep, Speed
from shardlm.plan.serving.weights import one_layer, rules_for, stages_of, weights_of
from shardlm.plan.sketch import refuse as unknown
from shardlm.plan.ways import divisors
from shardlm.serve.engine_config import EngineConfig
from shardlm.serve.memories import refuse
from shardlm.serve.submeshes import of_replica, of_stage
from shardlm.serving_rules import page_axes, serving_rules, split_pages

BATCHES = (1, 8, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class ServingPlan:
    """Of one mesh.

    decode    steps at several batches, of sequences in the middle of their replies
    prefill   seconds of one prompt with nothing beside it: the time to the first token of an idle engine
    most      the highest rate of a replica
    usual     at the rate asked for, over the replicas that it needs; without one at HEADROOM of the most
    replicas  for the rate asked for; without one, as many as the cluster holds
    image_seconds  of the encoder for one image of a prompt; 0 without images
    """

    case: ServingCase
    memory: ServingMemory
    decode: tuple[DecodeStep, ...]
    prefill: float
    most: Load
    usual: Load
    replicas: int
    image_seconds: float = 0.0

    @classmethod
    def of(cls, case: ServingCase, memory: ServingMemory | None = None) -> "ServingPlan":
        """`memory` of the case, where it is known already. Raises ShardlmError for a mesh that the engine refuses or
        that does not fit, and for latencies that it cannot have."""
        memory = memory or serving_memory(case)
        speed = Speed.of(case, memory)
        replica = Replica.of(case, speed)
        most = replica.most()
        if not most.rate:
            raise ShardlmError(_too_slow(case, most))
        sure = most.rate * HEADROOM
        count = math.ceil(case.request_rate / sure) if case.request_rate else case.engine.mesh.data
        usual = replica.at(case.request_rate / count if case.request_rate else sure)
        return cls(case, memory, _steps(case, memory), replica.alone, most, usual, count, speed.image_seconds)

    @functools.cached_property
    def fused(self) -> tuple[DecodeStep, ...]:
        """`decode` with fused products, of few enough tokens, where the engine tries out whether they are quicker; ()
        where it does not, or is planned with them. Where they were not measured all else is planned without them."""
        rows = 0 if planned(self.case) else possible(self.case)
        steps = _steps(self.case.on(fused_products="on"), self.memory) if rows else ()
        return tuple(step for step in steps if step.batch * (1 + self.case.engine.drafts) <= rows)

    @property
    def mesh(self) -> MeshSpec:
        """With as many replicas as are needed."""
        return dataclasses.replace(self.case.engine.mesh, data=self.replicas)

    @property
    def gpus_per_replica(self) -> int:
        return self.case.engine.mesh.size("pipeline", "expert", "tensor")

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.gpus_per_replica

    @property
    def at_once(self) -> int:
        """Requests of these lengths that run at once in a replica, none of them preempted."""
        return self.memory.at_once_of(self.case.mix)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of replies, at the highest rate."""
        return self.most.rate * self.case.mix.output / self.gpus_per_replica


def _steps(case: ServingCase, memory: ServingMemory) -> tuple[DecodeStep, ...]:
    speed = Speed.of(case, memory)
    context = Replica.of(case, speed).context
    return tuple(speed.decode(batch, context) for batch in BATCHES if batch <= memory.sizes.max_rows)


def mesh_text(engine: EngineConfig) -> str:
    """Of one replica, axes of size 1 left out."""
    mesh = engine.mesh
    axes = " ".join(f"{a}={mesh.size(a)}" for a in ("tensor", "expert", "pipeline") if mesh.size(a) > 1) or "one GPU"
    return axes + pages_text(engine)


def pages_text(engine: EngineConfig) -> str:
    """What follows a mesh's name where positions of pages are split: over how many devices."""
    ways = engine.decode_context_parallel_size
    return f", pages over {ways}" if ways > 1 else ""


def _too_slow(case: ServingCase, least: Load) -> str:
    wanted = getattr(case, least.limit)
    return (
        f"{least.limit}={wanted} is less than the {getattr(least, least.limit):.4g} s that an all but idle replica on "
        f"{case.engine.mesh} needs (estimated)"
    )


class DoesNotFit(ShardlmError):
    """No mesh of the cluster holds the model with the options asked for."""


@dataclasses.dataclass(frozen=True)
class Found:
    """plans ranked, the best first; why other meshes are not among them."""

    plans: tuple[ServingPlan, ...]
    refused: tuple[tuple[MeshSpec, str], ...]


def search(case: ServingCase, fixed: Mapping[str, int] = MappingProxyType({})) -> Found:
    """Every way to split the cluster's GPUs into equal replicas and each of them over tensor, expert and pipeline, the
    best first (`order`). Of the case's mesh nothing is kept; `fixed` are sizes of axes.
    Raises DoesNotFit where none fits (serving/change.py says what would), and ShardlmError where there is no such mesh
    or none as fast as asked for."""
    plans, refused = [], []
    for mesh in meshes(case, case.cluster.num_gpus, fixed):
        try:
            plans.append(best_on(case.on(mesh=mesh)))
        except ShardlmError as error:
            refused.append((mesh, str(error)))
    if not plans:
        raise _none(case, refused, fixed)
    return Found(tuple(sorted(plans, key=order)), tuple(refused))


def best_on(case: ServingCase) -> ServingPlan:
    """On the case's mesh; where pages limit it, or leave no room, with their positions split over devices that have
    copies of them, if that serves more and nobody says how they are. Raises as `ServingPlan.of`."""
    found: list[ServingPlan] = []
    why = None
    for one in itertools.chain([case], _split(case)):
        try:
            found.append(ServingPlan.of(one))
        except ShardlmError as error:
            why = error
            continue
        if found[-1].most.limit != "pages":  # more devices send each other more, and serve no more
            break
    if why and not found:
        raise why
    return min(found, key=order)


def _split(case: ServingCase) -> Iterator[ServingCase]:
    """With pages split over devices that have copies of them, over the fewest first, where nobody says how they are;
    nothing where none has, or they cannot be."""
    shape, engine = case.model.shape, case.engine
    if not case.splits:
        return
    try:
        rules = serving_rules(shape, of_stage(engine.mesh), case.weights)
    except ShardlmError:
        return
    for ways in sorted(page_axes(rules, shape).keys() - {1}):
        with contextlib.suppress(ShardlmError):
            split_pages(rules, shape, ways, engine.block_size)
            yield case.on(decode_context_parallel_size=ways)


def order(plan: ServingPlan) -> tuple[float, float, int]:
    """The best first: fewer GPUs for the rate asked for, more tokens of replies a GPU, smaller replicas."""
    gpus = plan.num_gpus if plan.case.request_rate else 0
    return gpus, -plan.tokens_per_second_per_gpu, plan.gpus_per_replica


def meshes(case: ServingCase, num_gpus: int, fixed: Mapping[str, int]) -> Iterator[MeshSpec]:
    """Of all divisors as a replica's GPUs."""
    shape = case.model.shape
    experts = max((block.mlp.num_experts for block in shape.blocks()), default=0)
    for own in divisors(num_gpus):
        for tensor, expert in itertools.product(divisors(own), repeat=2):
            if own % (tensor * expert) or (expert > 1 and (not experts or experts % expert)):
                continue
            pipeline = own // (tensor * expert)
            found = MeshSpec(data=num_gpus // own, tensor=tensor, expert=expert, pipeline=pipeline)
            if pipeline <= shape.num_layers and all(getattr(found, axis) == size for axis, size in fixed.items()):
                yield found


def _none(case: ServingCase, refused: Sequence[tuple[MeshSpec, str]], fixed: Mapping[str, int]) -> ShardlmError:
    gpu, count = case.cluster.gpu.name, case.cluster.num_gpus
    axes = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
    if not refused:
        return ShardlmError(
            f"{count} GPUs have no mesh with {axes}: all axes together are {count}, pipeline has at most the "
            f"{case.model.shape.num_layers} layers, and expert divides the experts{_sizes(case, fixed)}"
        )
    latencies = [why for _, why in refused if "all but idle replica" in why]
    if latencies:
        nearest = min(latencies, key=_seconds)
        return ShardlmError(f"no mesh of {count} {gpu} is as fast as asked for; the nearest: {nearest}")
    whole = [why for mesh, why in refused if not _undivided(case.on(mesh=mesh))]
    if not whole:
        asked = f" with {axes}" if fixed else ""
        return ShardlmError(f"no mesh of {count} {gpu}{asked} can be: {refused[-1][1]}{_sizes(case, fixed)}")
    return DoesNotFit(f"{case.model.name} does not fit on {count} {gpu} as asked for: {whole[-1]}")


def _undivided(case: ServingCase) -> str:
    """Why the case's mesh cannot be, however much memory there is: what of the model it does not divide or send on
    between stages, and models that have no formulas; "" where nothing speaks against it."""
    engine, shape = case.engine, case.model.shape
    try:
        unknown(shape, case.length)
        refuse(shape)
        shape.check_stages(engine.mesh.pipeline)
        one_layer(shape, of_stage(engine.mesh), case.dtype, engine.kv_cache_dtype)
        weights_of(shape, of_replica(engine.mesh), case.dtype, case.weights, engine.room)
        rules_for(engine, shape, case.weights)
        stages_of(shape.num_layers, of_replica(engine.mesh))
    except ShardlmError as error:
        return str(error)
    return ""


def _sizes(case: ServingCase, fixed: Mapping[str, int]) -> str:
    """Those that one of the axes asked for could have, where the others are as asked for."""
    said = []
    for axis in fixed:
        rest = {name: size for name, size in fixed.items() if name != axis}
        there = [mesh for mesh in meshes(case, case.cluster.num_gpus, rest) if not _undivided(case.on(mesh=mesh))]
        if there:
            said.append(f"{axis} could be {', '.join(map(str, sorted({mesh.size(axis) for mesh in there})))}")
    return f"; {' or '.join(said)} here" if said else ""


def _seconds(why: str) -> float:
    return float(why.split("the ")[1].split(" s ")[0])


def fits(case: ServingCase) -> bool:
    """Whether the engine takes the case's mesh and holds a request of max_model_len; where nobody says how pages are
    split, in split ones too."""
    for one in itertools.chain([case], _split(case)):
        with contextlib.suppress(ShardlmError):
            serving_memory(one)
            return True
    return False
