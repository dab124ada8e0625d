"""How long a step takes: every operation's kernels, every collective over its links, what hides behind what, and the
pipeline's idle time. Estimates, from formulas alone."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from shardlm.flops import attention_pairs, forward_flops, training_flops
from shardlm.plan import limits
from shardlm.plan.changed import changed
from shardlm.plan.cluster import Cluster, Group
from shardlm.plan.compute import of_layers, of_weights
from shardlm.plan.expert_memory import experts_gathered
from shardlm.plan.host import host_copies
from shardlm.plan.kernels import EIGHT_BITS, Kernels
from shardlm.plan.limits import Part
from shardlm.plan.measured import kernels_of
from shardlm.plan.op import Op
from shardlm.plan.overlap import IN_STAGES, Timed, overlapped, timed
from shardlm.plan.program_layers import sent_by_rest
from shardlm.plan.program_traffic import layers_traffic, weights_traffic
from shardlm.plan.sketch import Sketch
from shardlm.plan.traffic import Sent

ROUNDING = 1e-9  # of sums in another order
IMAGES = "images"  # what is read of them before a step, a phase, a layer and a limit of its own


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step, in seconds.

    compute     of kernels that have the device to themselves
    contention  by how much collectives beside them slow them down
    exposed     of communication that no kernel covers
    """

    name: str
    compute: float
    contention: float
    exposed: float

    @property
    def seconds(self) -> float:
        return self.compute + self.contention + self.exposed


@dataclasses.dataclass(frozen=True)
class AxisComm:
    """What a step sends over some axes: bytes of one device, seconds, and those of them that no kernel covers."""

    axes: tuple[str, ...]
    link: str
    nbytes: float
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One step of one device, in seconds.

    compute   of kernels by layer (op.Layer)
    units     the same by what limits them (compute.Unit); the optimizer apart
    repeated  of these, the forward pass a second time
    comms     every collective's
    timeline  forward, backward and optimizer; before them images, where rows have any
    bubble    idle while the pipeline fills and drains; staged: what waits while it does
    faster_matmul  products in fewer bits that the GPU has and the run does not use, in words; "" where there are none
    """

    compute: dict[str, float]
    units: dict[str, float]
    repeated_seconds: float
    comms: tuple[Timed, ...]
    timeline: tuple[Phase, ...]
    bubble_seconds: float
    staged_seconds: float
    model_flops: float
    tokens: float
    faster_matmul: str = ""

    @property
    def compute_seconds(self) -> float:
        return sum(self.compute.values())

    @property
    def image_seconds(self) -> float:
        """Of these, those in which images are read before the step."""
        return self.compute.get(IMAGES, 0.0)

    @property
    def exposed_seconds(self) -> float:
        return sum(one.exposed_seconds for one in self.comms)

    @property
    def hidden_seconds(self) -> float:
        return sum(one.hidden_seconds for one in self.comms)

    @property
    def contention_seconds(self) -> float:
        return sum(phase.contention for phase in self.timeline)

    @property
    def step_seconds(self) -> float:
        return sum(phase.seconds for phase in self.timeline) + self.bubble_seconds

    def seconds_with(self, idle: float) -> float:
        """The same step where stages are idle so long for each second that they work."""
        return self.step_seconds - self.bubble_seconds + idle * self.staged_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.step_seconds

    @property
    def by_axes(self) -> tuple[AxisComm, ...]:
        """The largest first."""
        found: dict[tuple[str, ...], list[Timed]] = {}
        for one in self.comms:
            found.setdefault(one.sent.axes, []).append(one)
        sums = (
            AxisComm(
                axes,
                timed[0].link,
                sum(one.sent.nbytes for one in timed),
                sum(one.seconds for one in timed),
                sum(one.exposed_seconds for one in timed),
            )
            for axes, timed in found.items()
        )
        return tuple(sorted(sums, key=lambda one: -one.seconds))

    @property
    def limit(self) -> str:
        """What takes most of the step, with the numbers, and what would make it less."""
        exposed = [("+".join(one.axes), one.link, one.exposed_seconds) for one in self.by_axes]
        return self.limited_by(self.step_seconds - self.exposed_seconds, exposed)

    def limited_by(self, busy: float, exposed: Iterable[tuple[str, str, float]]) -> str:
        """The same of a step whose kernels and idle stages take `busy` seconds, which are shared as here, and whose
        communication over axes joined by "+" and a link takes so many that nothing hides."""
        names = {"matmul": limits.MATMUL, "attention": limits.ATTENTION, "memory": limits.MEMORY}
        names |= {IMAGES: limits.IMAGES}
        kernels = [(names.get(unit, limits.OPTIMIZER), seconds) for unit, seconds in self.units.items()]
        kernels += [(limits.BUBBLE, self.bubble_seconds), (limits.CONTENTION, self.contention_seconds)]
        scale = busy / (self.step_seconds - self.exposed_seconds)
        parts = [Part(name, name, seconds * scale) for name, seconds in kernels]
        waits = [
            Part(axes.split("+")[0], f"communication over {axes} ({link}){limits.UNHIDDEN}", seconds)
            for axes, link, seconds in exposed
        ]
        total = busy + sum(part.seconds for part in waits)
        return limits.sentence(parts, waits, total, self.repeated_seconds * scale, self.faster_matmul)


@dataclasses.dataclass(frozen=True)
class Layers:
    """Of a step's kernels and traffic what is the same on all meshes that differ only in where weights rest, but for
    what goes by that (`by_rest`)."""

    times: "_Times"
    sent: tuple[Sent, ...]
    _timed: dict[tuple[Group, ...], list[Timed]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls, sketch: Sketch, cluster: Cluster, made: tuple[tuple[Op, ...], tuple[Sent, ...]] | None = None
    ) -> "Layers":
        """`made` of the sketch, where it is known already."""
        ops, sent = made or cls.made(sketch)
        return cls(_Times.of(ops, kernels_of(cluster, sketch.execution.attention)), sent)

    @staticmethod
    def made(sketch: Sketch) -> tuple[tuple[Op, ...], tuple[Sent, ...]]:
        """What layers compute and send, whatever the rates."""
        return tuple(of_layers(sketch)), tuple(layers_traffic(sketch))

    @functools.cached_property
    def _axes(self) -> tuple[tuple[str, ...], ...]:
        """Over which anything is sent."""
        return tuple(dict.fromkeys(one.axes for one in self.sent))

    @staticmethod
    def by_rest(sketch: Sketch) -> tuple:
        """What of where weights rest layers go by: where this and the inner axes are the same, they are."""
        mixed = any(block.mlp.num_experts for block in sketch.shape.kinds)
        beside = Layers.by_rest(sketch.beside) if sketch.beside else ()
        return (*sent_by_rest(sketch), mixed and experts_gathered(sketch), *beside)

    def timed(self, sketch: Sketch, cluster: Cluster) -> list[Timed]:
        """What is sent: on meshes whose axes lie alike over hosts it takes as long."""
        where = tuple([cluster.group(sketch.mesh, axes) for axes in self._axes])
        if where not in self._timed:
            self._timed[where] = timed(self.sent, sketch, cluster)
        return self._timed[where]


def step_cost(
    sketch: Sketch, cluster: Cluster, layers: Layers | None = None, weights: Iterable[Timed] | None = None
) -> StepCost:
    """The estimate for a step; `layers` of it and what is sent of `weights`, where they are known already."""
    layers = layers or Layers.of(sketch, cluster)
    times = layers.times.and_of(sketch.once(_of_weights), kernels_of(cluster, sketch.execution.attention))
    copied = host_copies(sketch, cluster, times.forward, times.backward)
    hidden = IN_STAGES[sketch.config.pipeline.schedule]
    weights = timed(weights_traffic(sketch), sketch, cluster) if weights is None else weights
    return _summed(sketch, cluster, times, [*weights, *layers.timed(sketch, cluster)], hidden, copied)


def _of_weights(sketch: Sketch) -> tuple[Op, ...]:
    return tuple(of_weights(sketch))


def without_weights(sketch: Sketch, cluster: Cluster, layers: Layers | None = None) -> StepCost:
    """The same of a step that did nothing with weights, gradients and state outside layers, which no split of them and
    no schedule can make faster: of all meshes that differ only in that split it is the same."""
    layers = layers or Layers.of(sketch, cluster)
    return _summed(sketch, cluster, layers.times, layers.timed(sketch, cluster), max(IN_STAGES.values()))


def at_least_seconds(sketch: Sketch, cluster: Cluster, layers: Layers) -> float:
    """No more than StepCost.step_seconds, whatever hides behind what: of layers their kernels, what they wait for, and
    stages that are idle for both; nothing of weights."""
    waits = [one for one in layers.timed(sketch, cluster) if not one.sent.beside and not one.sent.update]
    busy = layers.times.forward + layers.times.backward + sum(one.seconds for one in waits)
    staged = layers.times.staged + sum(one.seconds for one in waits if _in_stages(one.sent))
    bubble = sketch.schedule.bubble_fraction()
    return (1 - ROUNDING) * (busy + staged * bubble / (1 - bubble))


def cost_of(sketch: Sketch, cluster: Cluster, ops: Iterable[Op], sent: list[Sent], kernels: Kernels) -> StepCost:
    """The same of these operations, this traffic and these kernels, in stages that hide all they can."""
    return _summed(sketch, cluster, _Times.of(ops, kernels), timed(sent, sketch, cluster), 1.0)


def _summed(
    sketch: Sketch,
    cluster: Cluster,
    times: "_Times",
    sent: Sequence[Timed],
    hidden_in_stages: float,
    copied: tuple[Timed, ...] = (),
) -> StepCost:
    """`hidden_in_stages` as in overlap.py; `copied` to the host and from it."""
    kernels = (times.forward, times.backward)
    head = times.layers.get("head", 0.0)
    comms = overlapped(sent, sketch, cluster, *kernels, hidden_in_stages, times.optimizer, head)
    comms += copied
    timeline = _timeline(times, comms)
    passes = times.forward + times.backward
    slower = 1 + sum(phase.contention for phase in timeline[:2]) / passes if passes else 1.0
    staged = times.staged * slower + sum(one.exposed_seconds for one in comms if _in_stages(one.sent))
    bubble = sketch.schedule.bubble_fraction()
    train = sketch.config.train
    images = {IMAGES: sketch.images.added(sketch).encoder_seconds} if sketch.images else {}
    timeline = (*(Phase(name, seconds, 0.0, 0.0) for name, seconds in images.items()), *timeline)
    return StepCost(
        compute=times.layers | images,
        units=times.units | images,
        repeated_seconds=times.repeated,
        comms=comms,
        timeline=timeline,
        bubble_seconds=staged * bubble / (1 - bubble),
        staged_seconds=staged,
        model_flops=_model_flops(sketch.shape, train.global_batch, train.seq_len, sketch.config.lora.rank > 0)
        + (_forward_flops(sketch.beside.shape, train.global_batch, train.seq_len) if sketch.beside else 0),
        tokens=train.global_batch * train.seq_len,
        faster_matmul=_faster_matmul(sketch, cluster),
    )


def _faster_matmul(sketch: Sketch, cluster: Cluster) -> str:
    if sketch.config.matmul != "dtype" or sketch.config.lora.base != "dtype" or cluster.is_cpu:
        return ""
    if sketch.config.precision == "fp32":
        return "16-bit matmuls (precision=bf16)"
    return next((f"8-bit matmuls (matmul={name})" for name in EIGHT_BITS if cluster.gpu.peak.of(name)), "")


@dataclasses.dataclass
class _Times:
    """Seconds of a step's kernels: by layer and unit, by pass, of those that are repeated, and of those in stages."""

    layers: dict[str, float] = dataclasses.field(default_factory=dict)
    units: dict[str, float] = dataclasses.field(default_factory=dict)
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    repeated: float = 0.0
    staged: float = 0.0

    @classmethod
    def of(cls, ops: Iterable[Op], kernels: Kernels) -> "_Times":
        times = cls()
        times._add(ops, kernels)
        return times

    def and_of(self, ops: Iterable[Op], kernels: Kernels) -> "_Times":
        """Of these too."""
        times = changed(self, layers=dict(self.layers), units=dict(self.units))
        times._add(ops, kernels)
        return times

    def _add(self, ops: Iterable[Op], kernels: Kernels) -> None:
        known: dict[int, tuple[Op, tuple[float, float, float]]] = {}  # layers that are alike have the very same Ops
        for op in ops:
            if id(op) not in known:
                known[id(op)] = op, _seconds(op, kernels)
            forward, again, gradients = known[id(op)][1]
            optimizer = op.layer == "optimizer"
            seconds = forward + again + gradients
            if optimizer:
                self.optimizer += seconds
            else:
                self.forward += forward
                self.backward += again + gradients
                self.repeated += again
            self.staged += seconds if op.in_stages else 0.0
            unit = "optimizer" if optimizer else op.unit
            self.layers[op.layer] = self.layers.get(op.layer, 0.0) + seconds
            self.units[unit] = self.units.get(unit, 0.0) + seconds


def _seconds(op: Op, kernels: Kernels) -> tuple[float, float, float]:
    """Of a step: forward, again and for gradients; the optimizer's are the first."""
    once = kernels.forward_seconds(op)
    if op.layer == "optimizer":
        return op.count * once, 0.0, 0.0
    gradients = op.forward * kernels.gradient_seconds(op) if op.count > op.forward + op.again else 0.0
    return op.forward * once, op.again * once, gradients


def kernel_seconds(ops: Iterable[Op], kernels: Kernels) -> float:
    """Of a step, with the device to themselves."""
    return math.fsum(_Times.of(ops, kernels).layers.values())


@functools.lru_cache(maxsize=1024)
def _model_flops(shape, rows: int, length: int, frozen: bool) -> float:
    macs = shape.attention_macs(rows * attention_pairs([length]), rows * length)
    return training_flops(shape.parameters_per_token(), rows * length, macs, frozen=frozen)


@functools.lru_cache(maxsize=1024)
def _forward_flops(shape, rows: int, length: int) -> float:
    macs = shape.attention_macs(rows * attention_pairs([length]), rows * length)
    return forward_flops(shape.parameters_per_token(), rows * length, macs)


def _in_stages(sent: Sent) -> bool:
    """Whether stages that fill or drain wait for it too: our programs' gather weights in every tick."""
    return "pipeline" not in sent.axes and not sent.update and (not sent.beside or sent.idle_bytes > 0)


def _timeline(times: _Times, comms: tuple[Timed, ...]) -> tuple[Phase, ...]:
    last = sum(one.exposed_seconds for one in comms if one.sent.update)
    exposed = sum(one.exposed_seconds for one in comms) - last
    slowed_last = sum(one.slowing_seconds for one in comms if one.sent.update)
    slowed = sum(one.slowing_seconds for one in comms) - slowed_last
    first = sum(one.exposed_seconds * one.forward for one in comms)
    slowed_first = sum(one.slowing_seconds * one.forward for one in comms)
    return (
        Phase("forward", times.forward, slowed_first, first),
        Phase("backward", times.backward, slowed - slowed_first, exposed - first),
        Phase("optimizer", times.optimizer, slowed_last, last),
    )
