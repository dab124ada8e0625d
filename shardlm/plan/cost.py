"""How long a step takes: every operation against the GPU's roofline (https://doi.org/10.1145/1498765.1498785), every
collective over its links, what hides behind what, and the pipeline's idle time. Estimates, from formulas alone."""

import dataclasses

from shardlm.flops import attention_pairs, training_flops
from shardlm.plan.cluster import Cluster
from shardlm.plan.compute import Op, operations
from shardlm.plan.constants import ACHIEVED
from shardlm.plan.links import collective_seconds
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import Sent, training_traffic


@dataclasses.dataclass(frozen=True)
class Timed:
    """What a device sends for one reason in a step, and how long; `exposed` of it no kernel covers."""

    sent: Sent
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One step of one device, in seconds.

    compute  by layer (compute.Layer)
    comms    every collective's
    bubble   idle while the pipeline fills and drains
    """

    compute: dict[str, float]
    comms: tuple[Timed, ...]
    bubble_seconds: float
    model_flops: float
    tokens: float

    @property
    def compute_seconds(self) -> float:
        return sum(self.compute.values())

    @property
    def exposed_seconds(self) -> float:
        return sum(one.exposed_seconds for one in self.comms)

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds + self.bubble_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.step_seconds


def step_cost(sketch: Sketch, cluster: Cluster) -> StepCost:
    """The estimate for a step."""
    ops = operations(sketch)
    compute: dict[str, float] = {}
    staged = 0.0
    for op in ops:
        seconds = op_seconds(op, cluster) * op.count
        compute[op.layer] = compute.get(op.layer, 0) + seconds
        staged += seconds if op.in_stages else 0
    comms = _comms(sketch, cluster, sum(compute.values()))
    in_stages = staged + sum(one.exposed_seconds for one in comms if one.sent.axes == ("tensor",))
    bubble = sketch.schedule.bubble_fraction()
    train = sketch.config.train
    tokens = train.global_batch * train.seq_len
    pairs = train.global_batch * attention_pairs([train.seq_len]) * sketch.shape.attention_width()
    flops = training_flops(sketch.shape.parameters_per_token(), tokens, pairs)
    return StepCost(compute, comms, in_stages * bubble / (1 - bubble), flops, tokens)


def op_seconds(op: Op, cluster: Cluster) -> float:
    """Of one execution."""
    gpu, achieved = cluster.gpu, ACHIEVED[cluster.gpu.generation]
    memory = op.hbm_bytes / (gpu.hbm_bytes_per_second * achieved.memory)
    if op.unit == "memory":
        return max(memory, achieved.kernel_seconds)
    peak = gpu.peak.of(op.dtype) or gpu.peak.bf16
    if op.unit == "attention":
        fraction = achieved.attention
    else:
        fraction = achieved.matmul_fp8 if op.dtype in ("fp8", "int8") else achieved.matmul
    return max(op.flops / (peak * fraction), memory, achieved.kernel_seconds)


def _comms(sketch: Sketch, cluster: Cluster, compute_seconds: float) -> tuple[Timed, ...]:
    """Gathers, scatters and sums of weights run beside the layers' kernels (test_shipped_programs.py holds programs to
    it); what a layer waits for does not."""
    timed = []
    for sent in training_traffic(sketch):
        seconds = collective_seconds(sent.kind, sent.nbytes, sent.count, cluster.group(sketch.mesh, sent.axes), cluster)
        timed.append((sent, seconds))
    beside = sum(seconds for sent, seconds in timed if sent.beside)
    left = max(0.0, beside - compute_seconds) / beside if beside else 0.0
    return tuple(Timed(sent, seconds, seconds * left if sent.beside else seconds) for sent, seconds in timed)


def limit(cost: StepCost) -> str:
    """The one thing that takes most of a step."""
    parts = {f"{layer} ({'matmuls' if layer != 'optimizer' else 'memory'})": s for layer, s in cost.compute.items()}
    for one in cost.comms:
        name = f"{'+'.join(one.sent.axes)} communication"
        parts[name] = parts.get(name, 0) + one.exposed_seconds
    parts["pipeline bubble"] = cost.bubble_seconds
    return max(parts, key=parts.get)
