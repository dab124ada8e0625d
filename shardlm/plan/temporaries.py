"""Bytes that a step needs beside what rests, on one device, by what they are for: what XLA's buffer assignment holds at
its fullest.

A step has full moments. At the head, the loss makes its gradient while all that the forward pass kept is there. In the
layers, one layer's activations and weights come on top of what is kept and of the gradients. XLA's scheduler makes the
zeros that a loop's gradients are added to before the loss, so these count at both, but for some of them and where an
exchange behind the loss has room for them (head_memory.py). In stages of 1F1B all tokens' gradients are gathered for
the embedding's. In the update, where ZeRO 1 and 2 split only the optimizer's state, new weights are gathered. How many
arrays there are at each is read from the buffer assignments of the programs in tests/plan/compiled_memory.json.
"""

import dataclasses
import math
from collections.abc import Iterable

from shardlm.optim import ELEMENTWISE
from shardlm.plan import adapted, compressed_memory, linear_memory
from shardlm.plan.activations import WIDE, Kinds, Layer, exchanges, itemsize, kept, working
from shardlm.plan.head_memory import at_head, logits_of, waiting, zeros_behind
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import MASTER, state
from shardlm.rules import Table

AGAIN = {"none": 0, "dots": 1}  # of a layer's three hidden arrays, how many the backward pass makes again; else all


@dataclasses.dataclass(frozen=True)
class Throughout:
    """What is there while the head and the layers are at work."""

    parts: Parts
    kinds: Kinds

    @classmethod
    def of(cls, sketch: Sketch) -> "Throughout":
        parts = Parts.of(sketch)
        return cls(parts, _kept(sketch, parts) | _pipeline(sketch, parts))


def throughout(sketch: Sketch) -> Throughout:
    return Throughout.of(sketch)


def temporaries(sketch: Sketch, held: Throughout) -> tuple[Kinds, float]:
    """At the fullest of the moments; and how many of these bytes there are only if zeros are made before the head."""
    parts, always = held.parts, held.kinds
    during = (at_head, _in_layers, _between_layers, in_attention, _at_embedding)
    if adapted.applies(sketch, parts):
        during = (_at_head_of_adapted, _between_layers_of_adapted, in_attention)
    moments = [joined(always, at(sketch, parts)) for at in during] + [_in_update(sketch, parts)]
    for own in filter(None, (linear_memory.at_work(sketch, parts), compressed_memory.at_work(sketch, parts))):
        moments.append(joined(always, own, _around(sketch, parts)))
    moments.append(joined(always, _outside_stages(sketch, parts), _times(-1, _let_go(sketch, parts))))
    if sketch.beside:
        moments.append(joined(always, _beside(sketch.beside), {"gradients": -parts.resting}))
    if not sketch.loops and sketch.mesh.pipeline == 1:
        moments.append(joined(always, _in_layers(sketch, parts), _at_first_layer(sketch, parts)))
    fullest = max(moments, key=_total)
    before = parts.added - zeros_behind(sketch, parts) if sketch.loops else 0
    if moments[0] is not fullest or sketch.mesh.pipeline > 1 or not before:
        return fullest, 0
    return fullest, min(before, _total(fullest) - max(map(_total, moments[1:])))


def _beside(other: Sketch) -> Kinds:
    """In the forward pass of a teacher or a reference: weights of a layer and of the next one, and what its MLP reads
    and makes."""
    parts = Parts.of(other)
    widest = max((one for pattern in parts.layers for one in pattern), key=lambda one: one.hidden)
    return {"teacher": (1 + parts.gathers) * parts.largest + 3 * widest.hidden + 3 * widest.stream}


def _at_first_layer(sketch: Sketch, parts: Parts) -> Kinds:
    """Of layers that are in no loop, when the first is done backwards: the gradients of all others are there, and what
    these kept is gone."""
    others = 1 - 1 / sketch.shape.num_layers
    patterns = (_kept_of(sketch, number, pattern) for number, pattern in enumerate(parts.layers))
    return joined(_times(-others, joined(*patterns)), {"gradients": others * parts.resting})


def _around(sketch: Sketch, parts: Parts) -> Kinds:
    """While layers are done backwards whose next ones' weights come: the head's gradient waits whole; of stages, their
    own gradients."""
    whole = WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    stages = sketch.mesh.pipeline > 1 and not sketch.schedule.both_ways
    return waiting(sketch, whole) | ({"gradients": parts.resting} if stages else {})


def joined(*parts: Kinds) -> Kinds:
    """Their sums."""
    found = dict(parts[0])
    for part in parts[1:]:  # a search joins a million
        for name, nbytes in part.items():
            found[name] = found.get(name, 0) + nbytes
    return found


def _times(factor: float, kinds: Kinds) -> Kinds:
    return {name: factor * nbytes for name, nbytes in kinds.items()}


def _kept(sketch: Sketch, parts: Parts) -> Kinds:
    """Of the forward pass, and without a pipeline what gradients are summed in."""
    found = joined(*(_kept_of(sketch, number, pattern) for number, pattern in enumerate(parts.layers)))
    found["weights turned"] = parts.turned
    ones = [one for pattern in parts.layers for one in pattern]
    sent = "all_to_all" in exchanges(sketch)
    if sketch.mesh.pipeline > 1 and sketch.schedule.both_ways:
        zeros = max(one.rows if sent else one.zeros for one in ones)  # those of one buffer serve all
    else:  # that rows are received in: XLA makes them once, of several microbatches for all exchanges
        zeros = max((1 if sketch.passes > 1 else 4) * one.rows for one in ones) if sent else 0
    found["experts"] = zeros
    if parts.copied:  # with remat=none twice (8 layers of 8B on one GPU, compiled)
        found["weights copied"] = parts.copied * (2 if sketch.config.remat == "none" else 1)
    if sketch.mesh.pipeline == 1:
        # The sum of gradients and those of a microbatch. Without a loop over layers nothing is added to zeros, and a
        # layer's gradients come as what it kept goes; but on one GPU, which exchanges none, they wait where a run does
        # not ask for that (E2B's layers, none like another: 18.1 GiB foreseen without them, 19.2 compiled).
        alone = sketch.config.unroll and math.prod(sketch.mesh.sizes().values()) == 1
        own = parts.added if sketch.loops or alone else 0
        found["gradients"] = parts.resting + own + parts.around if sketch.passes > 1 else own
        # Zeros of the gradient of layers' inputs, which are made before the loss and filled when all layers are done.
        found["inputs"] = itemsize(sketch) * _of_inputs(sketch, sketch.rules.use)
    return found


def _of_inputs(sketch: Sketch, table: Table) -> int:
    """Numbers of the table of layers' inputs on one device, where it is trained."""
    found = (w for w in sketch.weights if w.path == "layer_inputs.table" and w.trained)
    return sum(weight.numbers(table) for weight in found)


def _kept_of(sketch: Sketch, number: int, pattern: tuple[Layer, ...]) -> Kinds:
    """Activations that the forward pass keeps of a segment."""
    schedule, stages = sketch.schedule, sketch.mesh.pipeline
    once = joined(*(kept(one, sketch) for one in pattern))
    repeats = sketch.shape.segments[number].repeats
    if stages == 1:
        return _times(repeats, once)
    if number != sketch.shape.pipelined_segment():  # with 1F1B each microbatch on its own, else all of a device's rows
        return _times(repeats * (1 if schedule.both_ways else sketch.passes / stages), once)
    if schedule.both_ways:  # inputs of the microbatches under way, and of the one that goes forward before it joins
        return {"streams kept": 2 * stages * schedule.slots * pattern[0].stream}
    return _times(schedule.slots * schedule.ticks, once)


def _gathers_ahead(sketch: Sketch) -> bool:
    """Whether the next layers' weights, which XLA gathers while these compute (xla_options.py), are beside all else:
    over several hosts. Where tensor splits the sequence, layers are as full with them as without (70B on 64 GPUs, seeds
    16, 49, 57, 67)."""
    return sketch.mesh.pipeline == sketch.mesh.tensor == 1 and sketch.num_gpus > sketch.gpus_per_host


def _pipeline(sketch: Sketch, parts: Parts) -> Kinds:
    """What stages hold throughout."""
    if sketch.mesh.pipeline == 1:
        return {}
    held = parts.resting * itemsize(sketch) / MASTER  # a stage's, cast once a step
    if sketch.schedule.both_ways:
        # Each stage has embedding and head whole over the axis.
        around = parts.around * (sketch.mesh.pipeline if "pipeline" in sketch.rules.rest.axes("embed") else 1)
        # Sums over context, XLA makes of all the stage's layers at once, behind its loop over them.
        summed = parts.whole if sketch.mesh.context > 1 else 0
        return {"weights in use": held + around, "gradients": parts.resting + summed + around}
    rows = parts.layers[0][0].stream * sketch.passes / sketch.mesh.pipeline  # of all microbatches, outside the stages
    return {"weights in use": held, "streams": 4 * rows}


def _at_head_of_adapted(sketch: Sketch, parts: Parts) -> Kinds:
    logits, chunks = logits_of(sketch)
    return adapted.at_head(sketch, parts, logits / chunks)


def _between_layers_of_adapted(sketch: Sketch, parts: Parts) -> Kinds:
    """Two arrays of what layers keep are copied at once (`_turned_streams`)."""
    return adapted.between_layers(sketch, parts) | {"streams kept": 2 * _turned_streams(sketch, parts)}


def _in_layers(sketch: Sketch, parts: Parts) -> Kinds:
    """The backward pass of the fullest layer, with its weights, the next one's and its gradients; those of the head."""
    found = _fullest(sketch, parts.layers)
    many = _layers_in_use(sketch, parts)
    found["weights in use"] = parts.largest * many
    come = parts.gathers and parts.experts and sketch.mesh.pipeline == 1
    if come and sketch.adapters:
        found = max(adapted.with_experts(sketch, parts, found), key=_total)
        come = False
    if come and "all_to_all" not in exchanges(sketch) and not _gathers_ahead(sketch):
        found = max((found | less for less in _beside_experts(parts, found["experts"])), key=_total)
    found["attention"] += _scores_of_others(sketch, parts)
    whole = WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    stages = sketch.mesh.pipeline > 1 and not sketch.schedule.both_ways
    # The head's gradient waits whole until all layers are done, or where it rests; that of a microbatch is in the sum,
    # and zeros of the embedding's are made in the compute type.
    rests = parts.around / (4 if sketch.passes > 1 else 2)
    found |= waiting(sketch, whole if stages or (_gathers_ahead(sketch) and _head_waits(sketch)) else rests)
    if stages:
        # Gradients of a stage; in one round XLA stacks those of a tick that go back to where weights rest, behind its
        # layers.
        back = sketch.config.pipeline.laps == 1 and parts.gathers
        stacked = parts.resting * itemsize(sketch) / MASTER if back else 0
        found["gradients"] = parts.resting + stacked
    return found


def _layers_in_use(sketch: Sketch, parts: Parts) -> float:
    """Whose weights are there as they are used, in the compute type."""
    if not parts.gathers:
        return 1
    if sketch.adapters:
        return 2  # no gradients wait to be sent back
    return 3 if sketch.mesh.pipeline == 1 else 2.5


def _head_waits(sketch: Sketch) -> bool:
    """Whether gathers a layer ahead leave the head's gradient to the end: not where what is made again waits for the
    layers' gradients, unless it goes round a ring or is not all of the layer (compiled: seeds 8 and 76)."""
    ring = sketch.mesh.context > 1 and sketch.execution.context_attention == "ring"
    late = sketch.passes == 1 and (ring or sketch.config.remat != "full")
    return late or "gather" not in exchanges(sketch)


def _beside_experts(parts: Parts, rows: float) -> tuple[Kinds, Kinds]:
    """What there is less of, where experts' weights come to the tokens: the next layer's, this one's turned for its
    kernels and the last one's gradients are there as the first product is made; as the last is, those gradients are
    gone."""
    ones = [one for pattern in parts.layers for one in pattern]
    begun = max(one.expert_hidden + 3 * one.rows for one in ones)
    return {"experts": begun}, {"weights in use": 2 * parts.largest, "experts": rows}


def _between_layers(sketch: Sketch, parts: Parts) -> Kinds:
    """While a layer's attention is done backwards, the layer before it is made again, and gradients of this one's MLP
    are not made yet; its weights are let go, but for adapters', which wait for no gradients of their own. The head's
    gradient waits whole until all layers are done."""
    if sketch.mesh.pipeline > 1:
        return _both_layers(sketch, parts)
    again = AGAIN.get(sketch.config.remat, 3)
    head = WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    two = max((_two_layers(one, sketch, again) for pattern in parts.layers for one in pattern), key=_total)
    found = joined(two, waiting(sketch, head), {"streams kept": _turned_streams(sketch, parts)})
    if sketch.adapters and parts.gathers:  # experts' come when rows are there
        found["weights in use"] = (parts.dense if parts.experts else parts.largest) * _layers_in_use(sketch, parts)
    elif sketch.adapters:
        found["streams"] -= 5 * parts.layers[-1][-1].stream
    return found


def in_attention(sketch: Sketch, parts: Parts) -> Kinds:
    """While cuDNN's kernel works backwards with a bias, which is there at no other moment; in stages `working` has it.
    Over several devices the MLP of the layer in front is made again meanwhile, but where that waits for tokens that are
    exchanged over context or tensor."""
    one = max((one for pattern in parts.layers for one in pattern), key=lambda layer: layer.bias)
    if not one.bias or sketch.mesh.pipeline > 1:
        return {}
    head = WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    ahead = sketch.num_gpus > 1 and sketch.mesh.context == sketch.mesh.tensor == 1
    return waiting(sketch, head) | {
        "mlp": (3 + AGAIN.get(sketch.config.remat, 3) if ahead else 2) * one.hidden,
        "attention": one.bias + 3 * (one.queries + one.keys + one.values) + 2 * (one.output + one.latents),
        "streams": 9 * one.stream,
        "weights in use": parts.largest * adapted.READ,
    }


def _both_layers(sketch: Sketch, parts: Parts) -> Kinds:
    """In a stage with two layers a round, which XLA's unrolled loop leaves in no loop: both are made again at once, and
    of gathered weights the two widest are there."""
    schedule, one = sketch.schedule, parts.layers[sketch.shape.pipelined_segment()][0]
    if schedule.both_ways or schedule.slots != 2 or sketch.config.remat not in ("full", "names"):
        return {}
    head = WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    return waiting(sketch, head) | {
        "mlp": 8 * one.hidden,
        "attention": one.mask + 2 * (one.queries + one.output) + one.keys + one.values,
        "streams": 14 * one.stream,
        "weights in use": parts.largest * (0.5 if parts.gathers else 0),
        "gradients": parts.resting,
    }


def _turned_streams(sketch: Sketch, parts: Parts) -> float:
    """Of several rows what layers keep may lie otherwise than the backward pass reads it, and XLA copies all layers' at
    once, one array after the other: with remat=none what is whole over tensor, gathered position by position, so that
    rows lie inside positions; with dots the queries that Ulysses' exchange takes head by head."""
    whole = sketch.config.remat == "none" and sketch.mesh.tensor > 1
    if sketch.rows <= 1 or not (whole or (sketch.config.remat == "dots" and _ulysses(sketch))):
        return 0
    each = zip(sketch.shape.segments, parts.layers, strict=True)
    return max(segment.repeats * (one.whole if whole else one.queries) for segment, pattern in each for one in pattern)


def _ulysses(sketch: Sketch) -> bool:
    return sketch.mesh.context > 1 and sketch.execution.context_attention == "ulysses"


def _two_layers(one: Layer, sketch: Sketch, again: int) -> Kinds:
    """Of 8-bit products one layer: they wait for the largest number of what they multiply; int8's come in float32. Of
    tokens exchanged over context no attention: it waits for them, but a mask of chosen tokens that is made again does
    not."""
    if sketch.products != "dtype":
        wide = 2 if sketch.products == "int8" else 0
        mlp = (3 + again + wide) * one.hidden
        return {"mlp": mlp, "attention": one.mask + one.queries + one.output, "streams": 3 * one.stream}
    attention = 3 * (one.queries + one.keys + one.values) + 2 * one.output if sketch.mesh.context == 1 else 0
    made = again and _ulysses(sketch) and sketch.execution.attention == "cudnn"
    masks = 2 if sketch.mesh.context == 1 or made else 0
    return {
        "mlp": (3 + again) * one.hidden,
        "attention": masks * one.mask + attention,
        "streams": 9 * one.stream,
    }


def _total(kinds: Kinds) -> float:
    return sum(kinds.values())


def _let_go(sketch: Sketch, parts: Parts) -> Kinds:
    """Of what the stages kept, what is gone when layers before them are done backwards; none where layers come after
    them."""
    longest = sketch.shape.pipelined_segment()
    before = longest > 0 and longest == len(parts.layers) - 1
    if sketch.mesh.pipeline == 1 or sketch.schedule.both_ways or not before:
        return {}
    return _kept_of(sketch, longest, parts.layers[longest])


def _fullest(sketch: Sketch, layers: Iterable[tuple[Layer, ...]]) -> Kinds:
    return max((working(one, sketch) for pattern in layers for one in pattern), key=_total)


def _outside_stages(sketch: Sketch, parts: Parts) -> Kinds:
    """Layers outside the stages of a pipeline, which work on all of a device's rows at once; gradients of the stage."""
    longest = sketch.shape.pipelined_segment()
    others = [pattern for number, pattern in enumerate(parts.layers) if number != longest]
    if sketch.mesh.pipeline == 1 or sketch.schedule.both_ways or not others:
        return {}
    rows = sketch.passes / sketch.mesh.pipeline
    return _times(rows, _fullest(sketch, others)) | {"gradients": parts.resting, "head": parts.around / 2}


def _at_embedding(sketch: Sketch, parts: Parts) -> Kinds:
    """In a stage of 1F1B, where the embedding rests split: its gradient is made of all tokens' gradients, which XLA
    gathers (V3, 128 ways: 7 GiB). The layers are done by then."""
    embedding = next(weight for weight in sketch.weights if weight.path == "embedding")
    axes = set(embedding.axes(sketch.rules.rest)) - set(embedding.axes(sketch.rules.use)) - {"pipeline"}
    if not (sketch.mesh.pipeline > 1 and sketch.schedule.both_ways and axes):
        return {}
    one = parts.layers[-1][0]
    streams = (2 + sketch.mesh.size(*axes)) * one.stream
    return {
        "streams": streams,
        "head": sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor * itemsize(sketch),
    }


def _scores_of_others(sketch: Sketch, parts: Parts) -> float:
    """Scores of XLA's attention in the other segments than the longest, which its scheduler makes beside it; outside
    the stages of a pipeline of all a device's rows."""
    if sketch.execution.attention != "xla" or sketch.mesh.context > 1 or sketch.schedule.both_ways:
        return 0
    rows = 2 * sketch.passes / sketch.mesh.pipeline if sketch.mesh.pipeline > 1 else 1  # and what masked ones are
    longest = sketch.shape.pipelined_segment()
    return rows * sum(pattern[0].mask for number, pattern in enumerate(parts.layers) if number != longest)


def _brought(sketch: Sketch, parts: Parts) -> float:
    """What the update brings from the host: a layer at a time, with what it becomes and the next one's (8B of 16 and 32
    layers on one GPU: 3.8 to 5.8 times a layer's weights; compiled); all at once of optimizers that look at more than
    one number (train/offload.py), and what it becomes."""
    config = sketch.config
    if config.optim.name not in ELEMENTWISE:
        return 2 * sketch.once(state).host
    away = config.offload.optimizer or config.offload.params
    return 4.5 * away * parts.resting / sum(segment.repeats for segment in sketch.shape.segments)


def _in_update(sketch: Sketch, parts: Parts) -> Kinds:
    """Where the optimizer's state is split and weights are whole, the new ones are gathered; beside them are parts of
    the new weights, moments and gradients."""
    rules = sketch.rules
    rests, split = (set(table.axes("embed")) for table in (rules.rest, rules.optimizer))
    if rests == split:  # gradients of all layers come back where they rest, whole over pipeline too
        # A table of layers' inputs whose gradient is scattered is turned, as are its moments and what they become: 5
        # arrays beside its gradient; on one GPU it is not.
        table = _of_inputs(sketch, rules.rest)
        turned = 5 * MASTER * table if table < _of_inputs(sketch, rules.use) else 0
        return {"gradients": parts.between, "inputs": turned, "update": _brought(sketch, parts)}
    ways = sketch.mesh.size(*(split - rests))
    return {"weights gathered": parts.between, "gradients": 1.25 * parts.between / ways}
