"""What the temporaries of a step are reckoned from (temporaries.py): its layers' activations, and bytes of weights
where they rest, as they are used, and as XLA copies them."""

import dataclasses
import functools
from typing import NamedTuple

from shardlm.plan.activations import Layer, exchanges, itemsize, layer
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.spread import Spread
from shardlm.plan.state import MASTER
from shardlm.rules import Rules


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the full moments of a step are made of.

    layers   by segment and block of its pattern
    resting  float32 of all layers' trained weights where they rest; of a pipeline's stage, what it holds of them and of
             empty slots: as many, where layers divide. With 1F1B each stage has the layers outside the stages whole
             over the axis
    whole    of these, what layers use as it rests
    turned   of these, split along another than their first dimension: XLA copies them with it first, to gather by
             rows; not where layers compute from a copy of weights that rest on the host. Of those that are not gathered
             what 8-bit products read the other way round, and of experts gate and up where their rows are not sent.
             Beside adapters frozen ones, as they are held
    largest  one layer's weights as they are used, in the compute type
    experts  of these, experts': XLA gathers them by rows and turns each for its kernel
    dense    of the layer with most of them, all but experts
    around   float32 of embedding and head where they rest
    between  float32 of all trained weights where they rest between steps
    added    what layers' gradients are added to: as `resting`; of a copy of weights that rest on the host in its type
    copied   that copy, of all layers, by which they compute; 0: there is none
    gathers  whether layers gather their weights
    """

    layers: tuple[tuple[Layer, ...], ...]
    resting: float
    whole: float
    turned: float
    largest: float
    experts: float
    dense: float
    around: float
    between: float
    added: float
    copied: float
    gathers: bool

    @classmethod
    def of(cls, sketch: Sketch) -> "Parts":
        shape = sketch.shape
        held = _Held.of(sketch)
        layers = [segment.num_layers for segment in shape.segments]
        apart = sketch.mesh.pipeline > 1 or sketch.config.offload.params
        first = 0 if apart or "all_to_all" in exchanges(sketch) else held.first
        used, experts = held.used, held.experts
        # Experts' of all layers at once only where a loop takes each layer's out of all (MiniMax: 4 layers, compiled).
        turned = held.turned + held.experts_turned / (1 if sketch.loops else sum(layers))
        copied = held.resting * itemsize(sketch) / MASTER if sketch.config.offload.params else 0
        return cls(
            layers=_layers(sketch),
            resting=held.resting,
            whole=held.whole,
            turned=first + (turned if held.gathers and not apart else held.flipped),
            largest=max(n / depth for n, depth in zip(used, layers, strict=True)),
            experts=max(n / depth for n, depth in zip(experts, layers, strict=True)),
            dense=max((n - own) / depth for n, own, depth in zip(used, experts, layers, strict=True)),
            around=held.around,
            between=held.between,
            added=copied or held.resting,
            copied=copied,
            gathers=held.gathers,
        )


def _layers(sketch: Sketch) -> tuple[tuple[Layer, ...], ...]:
    """Of each segment's pattern; those of equal blocks are one."""
    made = {block: layer(block, sketch) for block in sketch.shape.kinds}
    return tuple(tuple([made[block] for block in segment.pattern]) for segment in sketch.shape.segments)


class _Stages(NamedTuple):
    """What of a pipeline's stages weights go by: the segment that they have, how many they are, of how many places for
    each layer, and whether a schedule goes both ways."""

    segment: int
    count: int
    places: float
    both_ways: bool

    @classmethod
    def of(cls, sketch: Sketch) -> "_Stages | None":
        if sketch.mesh.pipeline == 1:
            return None
        one = sketch.schedule
        places = one.slots * one.rounds * one.stages / one.num_layers
        return cls(sketch.shape.pipelined_segment(), one.stages, places, one.both_ways)


@dataclasses.dataclass(frozen=True)
class _Held:
    """Of Parts, what only weights and where they rest decide: the same for all microbatches and remat policies.

    flipped  what 8-bit products read the other way round; first: of experts, gate and up
    experts_turned  what is turned of experts' weights, which is not in `turned`
    used, experts  bytes in the compute type, by segment
    """

    resting: float
    whole: float
    turned: float
    experts_turned: float
    flipped: float
    first: float
    around: float
    between: float
    used: tuple[float, ...]
    experts: tuple[float, ...]
    gathers: bool

    @classmethod
    def of(cls, sketch: Sketch) -> "_Held":
        eight_bits = sketch.products != "dtype" and sketch.mesh.pipeline == 1
        # A stage holds what it rounds (layers/stage_weights.py, ahead).
        size = MASTER if sketch.execution.by_scheme and sketch.mesh.pipeline > 1 else itemsize(sketch)
        return _held(sketch.spread, len(sketch.shape.segments), size, eight_bits, _Stages.of(sketch))


@functools.lru_cache(maxsize=16384)
def _held(spread: Spread, segments: int, size: int, eight_bits: bool, stages: _Stages | None) -> _Held:
    rules = spread.rules
    resting = whole = turned = experts_turned = flipped = first = around = between = 0
    used, experts = [0] * segments, [0] * segments
    for weight, at_rest, in_use in zip(spread.weights, spread.rest, spread.use, strict=True):
        rests = MASTER * at_rest if weight.trained else 0
        between += rests
        if weight.segment is None:
            around += rests
            continue
        split = "pipeline" in weight.axes(rules.rest)
        if stages and weight.segment == stages.segment:
            rests = rests * stages.places / (1 if split else stages.count)
        elif split and stages and stages.both_ways:  # each stage has it whole
            rests *= stages.count
        resting += rests
        numbers = size * in_use * weight.packed
        used[weight.segment] += numbers
        experts[weight.segment] += numbers if "experts" in weight.names else 0
        if not _gathered(weight, rules):
            whole += rests
            flipped += rests if eight_bits and _flipped(weight) else 0
            first += rests if "experts" in weight.names and not weight.path.endswith(".down") else 0
        elif _split_inside(weight, rules):
            moved = rests if weight.trained else weight.itemsize * at_rest
            of_experts = moved if "experts" in weight.names else 0
            turned, experts_turned = turned + moved - of_experts, experts_turned + of_experts
    gathers = bool(set(rules.rest.axes("embed")) - {"pipeline"})
    sums = (resting, whole, turned, experts_turned, flipped, first, around, between)
    return _Held(*sums, tuple(used), tuple(experts), gathers)


def _gathered(weight: Weight, rules: Rules) -> bool:
    """Whether layers gather it, over axes other than the pipeline."""
    return bool(set(weight.axes(rules.rest)) - set(weight.axes(rules.use)) - {"pipeline"})


def _flipped(weight: Weight) -> bool:
    """Whether 8-bit products keep it with its last dimensions first, for the backward pass: all but those of experts,
    which multiply 16 bits, and of the MLP's last, which is as it is needed."""
    return weight.is_matrix and "experts" not in weight.names and not weight.path.endswith(".down")


def _split_inside(weight: Weight, rules: Rules) -> bool:
    """Whether the dimension that is gathered comes after others that are larger than 1 on a device."""
    for size, name in list(zip(weight.shape, weight.names, strict=True))[weight.stacked :]:
        if set(rules.rest.axes(name)) - set(rules.use.axes(name)):
            return False
        if size > rules.rest.mesh.size(*rules.rest.axes(name)):
            return _gathered(weight, rules)
    return False
