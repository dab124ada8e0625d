"""The plan of a serving engine: its memory, pages, times and rates on one mesh, the best mesh for a cluster, and what
would make a model fit that does not. Estimates, by formulas; serving/verify.py compiles."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from shardlm.errors import ShardlmError
from shardlm.mesh import MeshSpec
from shardlm.plan.cluster import Cluster
from shardlm.plan.search import divisors
from shardlm.plan.serving.case import ServingCase
from shardlm.plan.serving.load import HEADROOM, Load, Replica
from shardlm.plan.serving.memory import ServingMemory, serving_memory
from shardlm.plan.serving.time import DecodeStep, Speed

BATCHES = (1, 8, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class ServingPlan:
    """Of one mesh.

    decode    steps at several batches, of sequences in the middle of their replies
    prefill   seconds of one prompt with nothing beside it: the time to the first token of an idle engine
    most      the highest rate of a replica
    usual     at the rate asked for, over the replicas that it needs; without one at HEADROOM of the most
    replicas  for the rate asked for; without one, as many as the cluster holds
    """

    case: ServingCase
    memory: ServingMemory
    decode: tuple[DecodeStep, ...]
    prefill: float
    most: Load
    usual: Load
    replicas: int

    @classmethod
    def of(cls, case: ServingCase) -> "ServingPlan":
        """Raises ShardlmError for a mesh that the engine refuses or that does not fit, and for latencies that it cannot
        have."""
        memory = serving_memory(case)
        speed = Speed.of(case, memory)
        replica = Replica.of(case, speed)
        most = replica.most()
        if not most.rate:
            raise ShardlmError(_too_slow(case, most))
        sure = most.rate * HEADROOM
        count = math.ceil(case.request_rate / sure) if case.request_rate else case.engine.mesh.data
        usual = replica.at(case.request_rate / count if case.request_rate else sure)
        batches = [batch for batch in BATCHES if batch <= memory.sizes.max_rows]
        steps = tuple(speed.decode(batch, replica.context) for batch in batches)
        return cls(case, memory, steps, replica.alone, most, usual, count)

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
        return self.memory.at_once(self.case.prompt_len, self.case.output_len)

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of replies, at the highest rate."""
        return self.most.rate * self.case.output_len / self.gpus_per_replica


def _too_slow(case: ServingCase, least: Load) -> str:
    wanted = getattr(case, least.limit)
    return (
        f"{least.limit}={wanted} is less than the {getattr(least, least.limit):.4g} s that an all but idle replica on "
        f"{case.engine.mesh} needs (estimated)"
    )


@dataclasses.dataclass(frozen=True)
class Found:
    """plans ranked, the best first; why other meshes are not among them."""

    plans: tuple[ServingPlan, ...]
    refused: tuple[tuple[MeshSpec, str], ...]


def search(case: ServingCase, fixed: Mapping[str, int] = MappingProxyType({})) -> Found:
    """Every way to split the cluster's GPUs into equal replicas and each of them over tensor, expert and pipeline, the
    best first, by tokens of replies a second and GPU. Of the case's mesh nothing is kept; `fixed` are sizes of axes.
    Raises ShardlmError where none fits, with the least number of GPUs and the shortest change of options that would do,
    and where there is no such mesh."""
    plans, refused = [], []
    for mesh in meshes(case, case.cluster.num_gpus, fixed):
        try:
            plans.append(ServingPlan.of(case.on(mesh=mesh)))
        except ShardlmError as error:
            refused.append((mesh, str(error)))
    if not plans:
        raise ShardlmError(_none(case, refused, fixed))
    plans.sort(key=lambda plan: (-plan.tokens_per_second_per_gpu, plan.gpus_per_replica))
    return Found(tuple(plans), tuple(refused))


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


def _none(case: ServingCase, refused: Sequence[tuple[MeshSpec, str]], fixed: Mapping[str, int]) -> str:
    gpu, count = case.cluster.gpu.name, case.cluster.num_gpus
    axes = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
    if not refused:
        return (
            f"{count} GPUs have no mesh with {axes}: all axes together are {count}, pipeline has at most the "
            f"{case.model.shape.num_layers} layers, and expert divides the experts"
        )
    latencies = [why for _, why in refused if "all but idle replica" in why]
    if latencies:
        return f"no mesh of {count} {gpu} is as fast as asked for; the nearest: {min(latencies, key=_seconds)}"
    least = least_gpus(case, fixed)
    message = f"{case.model.name} does not fit on {count} {gpu} as asked for: {refused[-1][1]}"
    changes = shortest_change(case, fixed)
    if changes:
        message += f"; it fits with {' and '.join(f'{name}={value}' for name, value in changes.items())} (estimated)"
    if not least:
        return f"{message}; no mesh of up to {MOST_GPUS} {gpu} holds it"
    return f"{message}; as it is it needs at least {least} {gpu} (estimated)"


def _seconds(why: str) -> float:
    return float(why.split("the ")[1].split(" s ")[0])


MOST_GPUS = 1024


def least_gpus(case: ServingCase, fixed: Mapping[str, int]) -> int | None:
    """The smallest number of GPUs of one replica on which it fits, whatever its speed; None above MOST_GPUS."""
    host = case.cluster.gpus_per_host if case.cluster.num_gpus > case.cluster.gpus_per_host else 8
    counts = [*range(1, host + 1), *range(2 * host, MOST_GPUS + 1, host)]
    for count in counts:
        there = case.cluster
        here = Cluster.of(there.gpu, count, min(host, count), there.nic_bytes_per_second, there.fabric)
        case_there = dataclasses.replace(case, cluster=here)
        if any(mesh.data == 1 and fits(case_there.on(mesh=mesh)) for mesh in meshes(case, count, fixed)):
            return count
    return None


def fits(case: ServingCase) -> bool:
    """Whether the engine takes the case's mesh and holds a request of max_model_len."""
    try:
        serving_memory(case)
    except ShardlmError:
        return False
    return True


def shortest_change(case: ServingCase, fixed: Mapping[str, int]) -> dict[str, object]:
    """The fewest options, and of equally few those that change replies least, with which some mesh of the cluster fits;
    {} where there are none. Each is tried by the same arithmetic as a plan."""
    choices = list(_choices(case))
    for count in (1, 2, 3):
        for several in itertools.combinations(choices, count):
            change = dict(several)
            if len(change) == count and _some_fit(case.on(**change), fixed):
                return change
    return {}


def _choices(case: ServingCase) -> Iterator[tuple[str, object]]:
    """Those that change no reply first."""
    engine, both = case.engine, case.prompt_len + case.output_len
    if engine.gpu_memory_utilization < 0.95:
        yield "gpu_memory_utilization", 0.95
    if case.length > both:
        yield "max_model_len", both
    if engine.kv_cache_dtype in ("auto", "bfloat16"):
        yield "kv_cache_dtype", "fp8"
    if engine.quantization is None:
        yield "quantization", "int8"
    if engine.quantization != "int4":
        yield "quantization", "int4"


def _some_fit(case: ServingCase, fixed: Mapping[str, int]) -> bool:
    return any(fits(case.on(mesh=mesh)) for mesh in meshes(case, case.cluster.num_gpus, fixed))
