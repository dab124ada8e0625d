"""Bytes that a step needs beside what rests, on one device: what XLA's buffer assignment holds at its fullest.

A step has two full moments. At the head, the loss makes its gradient while everything the forward pass kept is there.
In the layers' backward pass, one layer's activations and weights come on top of gradients and of what is kept. XLA's
scheduler makes the zeros that gradients are added to before the loss, so these count at both.
"""

import dataclasses
import math

from shardlm.ops.cross_entropy import CHUNK_BYTES
from shardlm.plan.activations import WIDE, Layer, itemsize, kept, layer, working
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.state import MASTER

Kinds = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Bytes of weights on one device, float32 where they rest and in the compute type where they are used.

    resting  of all layers (of a pipeline, a stage's, which are as many)
    turned   of those, whose embedding dimension is last: XLA copies them with it first, to gather by rows
    layer    one layer's, as it is used
    used     of all layers
    around   float32: embedding and head, as they rest
    """

    resting: float
    turned: float
    layer: float
    used: float
    around: float


def weights(sketch: Sketch) -> Weights:
    rules, size = sketch.rules, itemsize(sketch)
    layers = [w for w in sketch.weights if w.segment is not None]
    trained = [w for w in layers if w.trained]
    gathered = gathers(sketch)
    turned = [w for w in layers if w.is_matrix and w.trained and w.names[-1] in ("embed", "expert_embed")] if gathered and sketch.mesh.pipeline == 1 else []
    used = sum(w.numbers(rules.use) for w in layers) * size
    return Weights(
        resting=MASTER * sum(w.numbers(rules.rest) for w in trained),
        turned=MASTER * sum(w.numbers(rules.rest) for w in turned),
        layer=max(_layer_of(sketch, i, size) for i in range(len(sketch.shape.segments))),
        used=used,
        around=MASTER * sum(w.numbers(rules.rest) for w in sketch.weights if w.segment is None and w.trained),
    )


def _layer_of(sketch: Sketch, segment: int, size: int) -> float:
    own = [w for w in sketch.weights if w.segment == segment]
    return sum(w.numbers(sketch.rules.use) for w in own) * size / sketch.shape.segments[segment].repeats


def gathers(sketch: Sketch) -> bool:
    """Whether layers gather their weights (over axes other than the pipeline)."""
    return sketch.rules.rest.axes("embed") not in ((), ("pipeline",))


def temporaries(sketch: Sketch) -> Kinds:
    """At the fuller of the two moments, by what they are for."""
    held, w = always(sketch), weights(sketch)
    moments = [held | at_head(sketch, w), held | in_layers(sketch, w)]
    return max(moments, key=lambda kinds: sum(kinds.values()))


def always(sketch: Sketch) -> Kinds:
    """At both moments."""
    w, pipelined, shape = weights(sketch), sketch.mesh.pipeline > 1, sketch.shape
    found = {"activations kept": _kept(sketch), "weights turned": w.turned}
    found["zeros of experts"] = max(_zeros(layer(block, sketch)) for block in shape.all_blocks())
    one_f_one_b = sketch.config.pipeline.schedule == "1f1b"
    if not pipelined:
        found["gradients"] = w.resting
        if sketch.passes > 1:
            # Gradients are added up over microbatches; zeros to begin each with are made once and copied.
            found["sum of gradients"] = 2 * w.resting + 1.5 * w.around
            found["activations kept"] *= 2
    elif one_f_one_b:
        around = w.around * sketch.mesh.pipeline
        found["weights of the stage"] = w.resting + around
        found["sum of gradients"] = w.resting + around
        found["gradients"] = w.resting
    else:
        found["weights of the stage"] = w.resting
        found["rows of all stages"] = 4 * _outside(sketch)
    return found


def _zeros(one: Layer) -> float:
    """Zeros that XLA makes once for all layers: for rows of experts that stay empty, and to receive them in."""
    return one.expert_hidden + 4 * one.rows


def _outside(sketch: Sketch) -> float:
    """The stream of all microbatches outside the stages, where each device has its own rows."""
    one = layer(sketch.shape.segments[0].pattern[0], sketch)
    return one.stream * sketch.passes / sketch.mesh.pipeline


def _kept(sketch: Sketch) -> float:
    total = 0.0
    shape = sketch.shape
    schedule = sketch.schedule
    for number, segment in enumerate(shape.segments):
        one = sum(kept(layer(block, sketch), sketch) for block in segment.pattern)
        if sketch.mesh.pipeline == 1:
            total += segment.repeats * one
        elif number != shape.pipelined_segment():
            total += segment.repeats * one * (1 if schedule.both_ways else sketch.passes / sketch.mesh.pipeline)
        elif schedule.both_ways:
            inputs = layer(segment.pattern[0], sketch).stream * (2 * sketch.mesh.pipeline - 1)
            total += schedule.slots * one + inputs
        else:
            total += schedule.slots * schedule.ticks * one
    return total


def at_head(sketch: Sketch, w: Weights) -> Kinds:
    """Gradient of the head in float32, twice since the loop over chunks is unrolled twice; the head; the layer that
    begins the backward pass."""
    size, mesh = itemsize(sketch), sketch.mesh
    V, D = sketch.shape.vocab_size / mesh.tensor, sketch.shape.embed_dim
    one = layer(sketch.shape.segments[-1].pattern[-1], sketch)
    outside = mesh.pipeline > 1 and sketch.config.pipeline.schedule != "1f1b"
    many = sketch.passes / mesh.pipeline if outside else 1
    tokens = sketch.tokens * many
    chunks = math.ceil(tokens * V * 4 / CHUNK_BYTES)
    accumulated = mesh.pipeline == 1 and sketch.passes > 1  # the zeros to begin with are kept
    head = V * D * (WIDE * (min(2, chunks) + accumulated) + size)
    streams = (5 * one.stream + (4 * one.whole if mesh.tensor > 1 else 0)) * many + 3.5 * one.stream
    logits = math.ceil(tokens / chunks) * V * size
    return {"head": head, "logits": logits, "mask": one.mask, "streams": streams, "weights in use": 0.8 * w.layer}


def in_layers(sketch: Sketch, w: Weights) -> Kinds:
    """The backward pass of the largest layer, with its weights and their gradients; those of the head and embedding."""
    blocks = {block: layer(block, sketch) for segment in sketch.shape.segments for block in segment.pattern}
    largest = max((working(one, sketch) for one in blocks.values()), key=lambda kinds: sum(kinds.values()))
    found = largest | {"weights in use": 3 * w.layer if gathers(sketch) else w.layer, "head": w.around / 2}
    pipeline = sketch.config.pipeline
    if sketch.mesh.pipeline > 1 and pipeline.schedule != "1f1b":
        # Of the stage; and of one round, which is copied out of the stage's weights where there are several.
        found["gradients"] = w.resting + 2 * w.resting / pipeline.laps
        found["weights of a round"] = w.resting / pipeline.laps if pipeline.laps > 1 and gathers(sketch) else 0
    return found


def doubt(sketch: Sketch, nbytes: float) -> str:
    """Why the estimate of a step, `nbytes` in all, may be off by more than 5%; "" where nothing speaks for it."""
    return ""
