"""Bytes that a step needs beside what rests, on one device, by what they are for: what XLA's buffer assignment holds at
its fullest.

A step has full moments. At the head, the loss makes its gradient while all that the forward pass kept is there.
In the layers, one layer's activations and weights come on top of what is kept and of the gradients. XLA's scheduler
makes the zeros that a loop's gradients are added to before the loss, so these count at both. In stages of 1F1B all
tokens' gradients are gathered for the embedding's. In the update, where ZeRO 1 and 2 split only the optimizer's state,
new weights are gathered. How many arrays there are at each is read from the buffer assignments of the programs in
tests/plan/compiled_memory.json.
"""

import dataclasses
import math
from collections.abc import Iterable

from shardlm.layers.pipeline import Schedule
from shardlm.ops.cross_entropy import CHUNK_BYTES
from shardlm.ops.expert_dispatch import choose
from shardlm.plan.activations import WIDE, Kinds, Layer, itemsize, kept, layer, working
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.state import MASTER
from shardlm.rules import Rules


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the moments are made of.

    layers   by segment and block of its pattern
    resting  float32 of all layers' trained weights where they rest; of a pipeline's stage, what it holds of them and of
             empty slots: as many, where layers divide. With 1F1B each stage has the layers outside the stages whole
             over the axis
    whole    of these, what layers use as it rests
    turned   of these, split along another than their first dimension: XLA copies them with it first, to gather by
             rows; not where layers compute from a copy of weights that rest on the host. Of those that are not gathered
             what 8-bit products read the other way round
    largest  one layer's weights as they are used, in the compute type
    around   float32 of embedding and head where they rest
    between  float32 of all trained weights where they rest between steps
    gathers  whether layers gather their weights
    """

    layers: tuple[tuple[Layer, ...], ...]
    resting: float
    whole: float
    turned: float
    largest: float
    around: float
    between: float
    gathers: bool

    @classmethod
    def of(cls, sketch: Sketch) -> "Parts":
        rules, shape, size = sketch.rules, sketch.shape, itemsize(sketch)
        gathers = bool(set(rules.rest.axes("embed")) - {"pipeline"})
        resting = whole = turned = flipped = around = between = 0
        used = [0] * len(shape.segments)
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
            used[weight.segment] += size * weight.numbers(rules.use)
            if not _gathered(weight, rules):
                whole += rests
                flipped += rests if _flipped(weight, sketch) else 0
            elif _split_inside(weight, rules):
                turned += rests
        return cls(
            layers=tuple(tuple(layer(block, sketch) for block in segment.pattern) for segment in shape.segments),
            resting=resting,
            whole=whole,
            turned=turned if gathers and sketch.mesh.pipeline == 1 and not sketch.config.offload.params else flipped,
            largest=max(n / segment.num_layers for n, segment in zip(used, shape.segments, strict=True)),
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


def temporaries(sketch: Sketch) -> Kinds:
    """At the fullest of the moments."""
    parts = Parts.of(sketch)
    always = _kept(sketch, parts) | _pipeline(sketch, parts)
    during = (_at_head, _in_layers, _between_layers, _at_embedding)
    moments = [_joined(always, at(sketch, parts)) for at in during] + [_in_update(sketch, parts)]
    moments.append(_joined(always, _outside_stages(sketch, parts), _times(-1, _let_go(sketch, parts))))
    return max(moments, key=_total)


def _joined(*parts: Kinds) -> Kinds:
    """Their sums."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}


def _times(factor: float, kinds: Kinds) -> Kinds:
    return {name: factor * nbytes for name, nbytes in kinds.items()}


def _kept(sketch: Sketch, parts: Parts) -> Kinds:
    """Of the forward pass, and without a pipeline what gradients are summed in."""
    found = _joined(*(_kept_of(sketch, number, pattern) for number, pattern in enumerate(parts.layers)))
    found["weights turned"] = parts.turned
    zeros = max(one.zeros for pattern in parts.layers for one in pattern)
    if sketch.mesh.pipeline > 1 and sketch.schedule.both_ways and _sends_tokens(sketch):
        zeros = max(one.rows for pattern in parts.layers for one in pattern)  # those of one buffer serve all
    found["experts"] = 3 * zeros if _moves_early(sketch) else zeros
    if sketch.mesh.pipeline == 1:
        # The sum of gradients and those of a microbatch; with gathers ahead, of two, as the loop is unrolled twice.
        many = (3 * parts.resting - parts.whole if _gathers_ahead(sketch) else 2 * parts.resting) + 1.5 * parts.around
        found["gradients"] = many if sketch.passes > 1 else parts.resting
    return found


def _kept_of(sketch: Sketch, number: int, pattern: tuple[Layer, ...]) -> Kinds:
    """Activations that the forward pass keeps of a segment."""
    schedule, stages = sketch.schedule, sketch.mesh.pipeline
    once = _joined(*(kept(one, sketch) for one in pattern))
    repeats = sketch.shape.segments[number].repeats
    if stages == 1:  # and the zeros that the next microbatch's are written over
        return _times(repeats * (2 if _begins_early(sketch) else 1), once)
    if number != sketch.shape.pipelined_segment():  # with 1F1B each microbatch on its own, else all of a device's rows
        return _times(repeats * (1 if schedule.both_ways else sketch.passes / stages), once)
    if schedule.both_ways:  # inputs of the microbatches under way, and of the one that goes forward before it joins
        return {"streams kept": 2 * stages * schedule.slots * pattern[0].stream}
    return _times(schedule.slots * schedule.ticks, once)


def _begins_early(sketch: Sketch) -> bool:
    """Whether the zeros of the next microbatch are made in this one: exchanges inside layers keep them apart, but where
    all is kept (compiled: Llama 3 8B, fsdp=4 x context=2, remat=none, two microbatches)."""
    mesh = sketch.mesh
    apart = mesh.expert > 1 or (mesh.context > 1 and sketch.config.remat != "none")
    return mesh.pipeline == 1 and sketch.passes > 1 and not apart and _gathers_ahead(sketch)


def _gathers_ahead(sketch: Sketch) -> bool:
    """Whether XLA gathers the next layers' weights while these compute, and with them the next microbatch's
    (xla_options.py): over several hosts, but in stages where tensor splits the sequence."""
    return 1 in (sketch.mesh.tensor, sketch.mesh.pipeline) and sketch.num_gpus > sketch.gpus_per_host


def _moves_early(sketch: Sketch) -> bool:
    """Whether what the next microbatch's rows are received in is made in this one, as its weights are gathered."""
    return sketch.mesh.pipeline == 1 and sketch.passes > 1 and _sends_tokens(sketch) and _gathers_ahead(sketch)


def _sends_tokens(sketch: Sketch) -> bool:
    """Whether tokens go to the devices of their experts, each to its own."""
    moes = [block.mlp for block in sketch.shape.kinds if block.mlp.num_experts]
    return any(choose(sketch.mesh.expert, moe.top_k) == "all_to_all" for moe in moes)


def _gathers_tokens(sketch: Sketch) -> bool:
    """Whether experts see the tokens of all devices of their axis."""
    moes = [block.mlp for block in sketch.shape.kinds if block.mlp.num_experts]
    return any(choose(sketch.mesh.expert, moe.top_k) == "gather" for moe in moes)


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


def _at_head(sketch: Sketch, parts: Parts) -> Kinds:
    """The head in the compute type and its gradient in float32, twice as the loop over chunks is unrolled twice; a
    chunk's logits; of the layer that begins the backward pass what is made again meanwhile."""
    size, mesh, one = itemsize(sketch), sketch.mesh, parts.layers[-1][-1]
    numbers = sketch.shape.vocab_size / mesh.tensor * sketch.shape.embed_dim
    outside = sketch.passes / mesh.pipeline if mesh.pipeline > 1 and not sketch.schedule.both_ways else 1
    tokens = sketch.tokens * outside
    chunks = math.ceil(tokens * sketch.shape.vocab_size / mesh.tensor * WIDE / CHUNK_BYTES)
    # Zeros that are kept: the next microbatch's gradient begins with them; in float32 the embedding's gradient too.
    extra = _begins_early(sketch) or size == WIDE
    # In a pipeline of one round half of the gradients' sums are begun.
    begun = mesh.pipeline > 1 and not sketch.schedule.both_ways and sketch.config.pipeline.laps == 1
    ahead = sketch.config.remat != "offload"  # the input of the layer that is made again comes from the host
    # In a tick of 1F1B the stage's last layer is made again meanwhile, beside what comes from its neighbours.
    both = sketch.mesh.pipeline > 1 and sketch.schedule.both_ways
    again = one.queries + one.keys + one.output if both else 0
    return {
        "head": numbers * (WIDE * (min(2, chunks) + extra) + size),
        "gradients": parts.resting / 2 if begun else 0,
        "logits": tokens / chunks * sketch.shape.vocab_size / mesh.tensor * size,
        "attention": one.mask + again,
        "streams": (5 * outside + 3.5 * ahead + 3.5 * both) * one.stream,
        "weights in use": 0.8 * parts.largest * ahead,
    }


def _in_layers(sketch: Sketch, parts: Parts) -> Kinds:
    """The backward pass of the fullest layer, with its weights, the next one's and its gradients; those of the head."""
    found = _fullest(sketch, parts.layers)
    many = (3 if sketch.mesh.pipeline == 1 else 2.5) if parts.gathers else 1
    found |= {"weights in use": parts.largest * many, "head": _head_in_layers(sketch, parts)}
    found["attention"] += _scores_of_others(sketch, parts)
    if _moves_early(sketch):
        found["experts"] += 4 * max(one.rows for pattern in parts.layers for one in pattern)
    if sketch.mesh.pipeline == 1 and _sends_tokens(sketch) and sketch.num_gpus > sketch.gpus_per_host:
        found["experts"] += max(one.rows for pattern in parts.layers for one in pattern)  # another exchange under way
    if sketch.mesh.pipeline > 1 and not sketch.schedule.both_ways:
        # Gradients of a stage; in one round XLA stacks those of a tick, and sums them over devices behind its layers.
        # The head's gradient waits whole; layers outside are made again meanwhile.
        stacked = parts.resting * itemsize(sketch) / MASTER if sketch.config.pipeline.laps == 1 else 0
        found["gradients"] = parts.resting + stacked
        found["head"] = WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
        found = _joined(found, _made_again_outside(sketch, parts))
    return found


def _head_in_layers(sketch: Sketch, parts: Parts) -> float:
    """Of embedding and head, while layers go backward."""
    numbers = sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    if sketch.mesh.pipeline > 1 or not _gathers_ahead(sketch):
        return parts.around / 2
    if sketch.passes > 1:
        # Those of the next microbatch, and the embedding's gradient. Not where tokens are gathered for their experts:
        # what is made again of a layer is bound to its gradients (layers/stack.py).
        return parts.around / 2 + (0 if _gathers_tokens(sketch) else 3 * numbers * itemsize(sketch))
    # The head's gradient waits whole until all layers are done, but where what is made again is bound and moves
    # nothing between devices.
    ring = sketch.mesh.context > 1 and sketch.execution.context_attention == "ring"
    waits = sketch.config.remat == "none" or ring or _sends_tokens(sketch)
    return WIDE * numbers if waits else parts.around / 2


def _between_layers(sketch: Sketch, parts: Parts) -> Kinds:
    """While a layer's attention is done backwards, the layer before it is made again, and gradients of this one's MLP
    are not made yet; its weights are let go. The head's gradient waits whole until all layers are done."""
    if sketch.mesh.pipeline > 1:
        return {}
    again = {"none": 0, "dots": 1}.get(sketch.config.remat, 3)
    return max((_two_layers(one, sketch, again) for pattern in parts.layers for one in pattern), key=_total) | {
        "head": WIDE * sketch.shape.vocab_size * sketch.shape.embed_dim / sketch.mesh.tensor
    }


def _two_layers(one: Layer, sketch: Sketch, again: int) -> Kinds:
    """Of 8-bit products one layer: they wait for the largest number of what they multiply; int8's come in float32."""
    if sketch.config.matmul != "dtype":
        wide = 2 if sketch.config.matmul == "int8" else 0
        mlp = (3 + again + wide) * one.hidden
        return {"mlp": mlp, "attention": one.mask + one.queries + one.output, "streams": 3 * one.stream}
    keys = one.keys + one.values
    return {
        "mlp": (3 + again) * one.hidden,
        "attention": 2 * one.mask + 3 * one.queries + 3 * keys + 2 * one.output if sketch.mesh.context == 1 else 0,
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


def _made_again_outside(sketch: Sketch, parts: Parts) -> Kinds:
    """Of the last layer outside the stages, which nothing holds back from being made again but the moves of a ring:
    then no more than its keys are."""
    longest = sketch.shape.pipelined_segment()
    others = [pattern[-1] for number, pattern in enumerate(parts.layers) if number != longest]
    if not others:
        return {}
    rows, one = sketch.passes / sketch.mesh.pipeline, others[-1]
    if sketch.mesh.context > 1 and sketch.execution.context_attention == "ring":
        return {"attention": rows * one.keys, "streams": rows * 2 * one.stream}
    attention = one.queries + one.keys + one.output
    return {"mlp": rows * one.hidden, "attention": rows * attention, "streams": rows * 4 * one.stream}


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


def _in_update(sketch: Sketch, parts: Parts) -> Kinds:
    """Where the optimizer's state is split and weights are whole, the new ones are gathered; beside them are parts of
    the new weights, moments and gradients."""
    rules = sketch.rules
    rests, split = (set(table.axes("embed")) for table in (rules.rest, rules.optimizer))
    if rests == split:  # gradients of all layers come back where they rest, whole over pipeline too
        return {"gradients": parts.between}
    ways = sketch.mesh.size(*(split - rests))
    return {"weights gathered": parts.between, "gradients": 1.25 * parts.between / ways}
