"""What the temporaries of a step are reckoned from (temporaries.py): its layers' activations, and bytes of weights
where they rest, as they are used, and as XLA copies them."""

import dataclasses

from shardlm.layers.pipeline import Schedule
from shardlm.plan.activations import Layer, exchanges, itemsize, layer
from shardlm.plan.sketch import Sketch, Weight
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
    gathers: bool

    @classmethod
    def of(cls, sketch: Sketch) -> "Parts":
        rules, shape, size = sketch.rules, sketch.shape, itemsize(sketch)
        gathers = bool(set(rules.rest.axes("embed")) - {"pipeline"})
        resting = whole = turned = flipped = first = around = between = 0
        used, experts = [0] * len(shape.segments), [0] * len(shape.segments)
        for weight in sketch.weights:
            rests = MASTER * weight.numbers(rules.rest) if weight.trained else 0
            between += rests
            if weight.segment is None:
                around += rests
                continue
            split = "pipeline" in weight.axes(rules.rest)
            if sketch.staged(weight):
                rests = _of_stage(rests, split, sketch.schedule)
            elif split and sketch.schedule.both_ways:
                rests *= sketch.mesh.pipeline
            resting += rests
            in_use = size * weight.numbers(rules.use) * weight.packed
            used[weight.segment] += in_use
            experts[weight.segment] += in_use if "experts" in weight.names else 0
            if not _gathered(weight, rules):
                whole += rests
                flipped += rests if _flipped(weight, sketch) else 0
                first += rests if "experts" in weight.names and not weight.path.endswith(".down") else 0
            elif _split_inside(weight, rules):
                turned += rests if weight.trained else weight.itemsize * weight.numbers(rules.rest)
        layers = [segment.num_layers for segment in shape.segments]
        apart = sketch.mesh.pipeline > 1 or sketch.config.offload.params
        first = 0 if apart or "all_to_all" in exchanges(sketch) else first
        return cls(
            layers=tuple(tuple(layer(block, sketch) for block in segment.pattern) for segment in shape.segments),
            resting=resting,
            whole=whole,
            turned=first + (turned if gathers and not apart else flipped),
            largest=max(n / depth for n, depth in zip(used, layers, strict=True)),
            experts=max(n / depth for n, depth in zip(experts, layers, strict=True)),
            dense=max((n - own) / depth for n, own, depth in zip(used, experts, layers, strict=True)),
            around=around,
            between=between,
            gathers=gathers,
        )


def _of_stage(rests: float, split: bool, schedule: Schedule) -> float:
    """Of a stage's part of a weight that rests so, and empty slots; `split` is whether it rests split over pipeline."""
    slots = schedule.slots * schedule.rounds * schedule.stages / schedule.num_layers
    return rests * slots / (1 if split else schedule.stages)


def _gathered(weight: Weight, rules: Rules) -> bool:
    """Whether layers gather it, over axes other than the pipeline."""
    return bool(set(weight.axes(rules.rest)) - set(weight.axes(rules.use)) - {"pipeline"})


def _flipped(weight: Weight, sketch: Sketch) -> bool:
    """Whether 8-bit products keep it with its last dimensions first, for the backward pass: all but those of experts,
    which multiply 16 bits, and of the MLP's last, which is as it is needed."""
    eight_bits = sketch.config.matmul != "dtype" and sketch.mesh.pipeline == 1
    return eight_bits and weight.is_matrix and "experts" not in weight.names and not weight.path.endswith(".down")


def _split_inside(weight: Weight, rules: Rules) -> bool:
    """Whether the dimension that is gathered comes after others that are larger than 1 on a device."""
    for size, name in list(zip(weight.shape, weight.names, strict=True))[weight.stacked :]:
        if set(rules.rest.axes(name)) - set(rules.use.axes(name)):
            return False
        if size > rules.rest.mesh.size(*rules.rest.axes(name)):
            return _gathered(weight, rules)
    return False
