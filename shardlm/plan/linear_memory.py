"""Bytes that a step with linear attention needs, beside what rests and what layers keep, while layers are done
backwards; and one with patterns of layers that wait alike. How many arrays there are is read from the buffer
assignments of the programs in tests/plan/compiled_memory.json."""

from collections.abc import Sequence

from shardlm.layers.altup import AltUpConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.layers.stack import Segment
from shardlm.plan import compressed_memory
from shardlm.plan.activations import Kinds, Layer, exchanges, kept
from shardlm.plan.linear_attention import Rule
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch

# Where kernels compute the gated delta rule: arrays of MLPs of a pattern that was made again, and of its stream.
MADE_AGAIN, STREAMS_AGAIN = 1.4, 12
SENT = 8.3  # arrays of rows that were sent to their experts, of each layer of a pattern
# Of what a layer of Mamba 2 has while it is done backwards, what the others of its pattern have made again: what was
# projected, and values once in float32 (Nemotron-H's pattern over context, rows of 8,192: 160 of 672 MiB each).
READY = 1 / 4


def at_work(sketch: Sketch, parts: Parts) -> Kinds:
    """{} where the model has none.

    All layers of a pattern are in one loop, and XLA does the products that make weights' gradients late, so that all
    of their MLPs' arrays and inputs are there; not inside stages, nor where nothing is made again. Of a pattern's
    layers all weights that are gathered are there, and some of the next repeat. More than layers' inputs is copied out
    of what all keep, but of two repeats, which XLA's unrolled loop leaves in no loop. What has decays by channel is
    made again of all layers of a pattern before one is done backwards; of what kernels of Mamba 2 compute gradients
    wait for projections' as MLPs' do. What kernels of the gated delta rule keep is there while layers are made again,
    and no longer while MLPs' arrays wait: the fuller of both.
    """
    segments = zip(parts.layers, sketch.shape.segments, strict=True)
    found = [_of(sketch, parts, pattern, one) for pattern, one in segments if _holds(pattern, one)]
    return max(found, key=lambda kinds: sum(kinds.values()), default={})


def _holds(pattern: Sequence[Layer], segment: Segment) -> bool:
    """Whether layers are such: streams that are predicted and corrected wait for weights' gradients alike, mixtures
    and dense layers between which some is added later, and layers of several kinds that attend to chosen tokens."""
    return _predicted(segment) or _chooses(segment) or any(each.rule or each.later for each in pattern)


def _predicted(segment: Segment) -> bool:
    return any(isinstance(block.streams, AltUpConfig) for block in segment.pattern)


def _chooses(segment: Segment) -> bool:
    """Whether layers of several kinds attend to chosen tokens."""
    return len(segment.pattern) > 1 and any(
        isinstance(mixer, MlaConfig) and mixer.indexer for mixer in _mixers(segment)
    )


def _of(sketch: Sketch, parts: Parts, pattern: Sequence[Layer], segment: Segment) -> Kinds:
    one = max(pattern, key=lambda each: each.rule)
    again, copies = sketch.config.remat != "none", sketch.config.remat in ("none", "dots") and segment.repeats > 2
    by_channel = any(getattr(mixer, "by_channel", False) for mixer in _mixers(segment))
    by_kernels = any(Rule.of(attention, sketch).kernels for attention in _of_mamba(segment))
    straight = any(getattr(mixer, "straight", False) for mixer in _mixers(segment))  # one after the other (1 program)
    late = _late(sketch, pattern, segment) if again and not straight else (one,)
    waiting = (one,) if straight else pattern if by_channel else late if by_kernels else (one,)
    rule = sum(each.rule for each in waiting) if again else max(0.0, one.rule - one.rule_kept)
    taken = sum(sum(kept(layer, sketch).values()) for layer in pattern) if copies else 0
    if again and _in_turn(sketch, segment):
        late, rule = (one,), one.rule + READY * (sum(each.rule for each in pattern) - one.rule)
        taken += max(each.bias for each in pattern)
    if _chooses(segment):  # the layer that is done backwards attends to chosen tokens
        taken += max(each.mask + 2 * (each.queries + each.keys + each.values + each.output) for each in pattern)
    many = 8 if by_channel else 3 if _predicted(segment) else 0  # arrays that are whole over tensor
    wide = many * sum(layer.whole for layer in late) if sketch.mesh.tensor > 1 else 0
    streams = 8 * sum(layer.stream - layer.later for layer in late) / sketch.mesh.tensor + wide
    if by_channel and one.one:  # several streams, of which there are as many as of DeepSeek V4's (2 compiled programs)
        streams = compressed_memory.of_streams(late, sketch.mesh.tensor)
    kinds = {
        "linear attention": rule,
        "mlp": (4 if again else 2) * sum(layer.products * layer.hidden for layer in late),
        "streams": streams,
        "attention": taken,
        "experts": _experts(sketch, late),
        "weights in use": parts.largest * ((1 if straight else 1.5) * len(pattern) if parts.gathers else 1),
    }
    ways = [Rule.of(mixer, sketch) for mixer in _mixers(segment) if _of_delta(mixer)]
    if not (again and any(way.kernels for way in ways)):
        return kinds
    # Of several microbatches those that were made again are there besides (16 layers of 9B: 7% of all).
    rules = sum(layer.rule for layer in late)
    waits = kinds | {"linear attention": rules if sketch.passes > 1 else 0.0}
    return max(waits, kinds | _made_again(sketch, late), key=lambda kinds: sum(kinds.values()))


def _made_again(sketch: Sketch, layers: Sequence[Layer]) -> Kinds:
    return {
        "linear attention": sum(layer.rule for layer in layers),
        "mlp": MADE_AGAIN * sum(layer.products * layer.hidden for layer in layers),
        "streams": STREAMS_AGAIN * sum(layer.stream for layer in layers) / sketch.mesh.tensor,
    }


def _of_delta(attention) -> bool:
    return isinstance(attention, DeltaNetConfig) and attention.takes_back and not isinstance(attention, ShortConvConfig)


def _in_turn(sketch: Sketch, segment: Segment) -> bool:
    """Whether layers of Mamba 2 are done backwards one after the other, their projections made again before: where
    tensor or context alone splits heads, of groups that devices do not share, in dense models (3 compiled programs)."""
    alone = sketch.mesh.pipeline == 1 and _one_axis(sketch) and not exchanges(sketch)
    return bool(_of_mamba(segment)) and alone and not _shared(sketch, segment)


def _late(sketch: Sketch, pattern: Sequence[Layer], segment: Segment) -> Sequence[Layer]:
    """Those whose arrays wait for the products that make weights' gradients: all, but in stages one. Of Mamba 2 two: in
    stages, where devices share groups, and where either tensor or context splits heads (9 of 20 compiled programs); of
    short convolutions where tensor or context splits anything (2 of 2)."""
    pipelined = sketch.mesh.pipeline > 1
    convolves = any(isinstance(mixer, ShortConvConfig) for mixer in _mixers(segment))
    if convolves and sketch.mesh.size("tensor", "context") > 1:
        return sorted(pattern, key=lambda one: one.rule + one.hidden)[-2:]
    if not _of_mamba(segment):
        return (max(pattern, key=lambda one: one.rule),) if pipelined else pattern
    if pipelined or _shared(sketch, segment) or _one_axis(sketch):
        return sorted(pattern, key=lambda one: one.rule + one.hidden)[-2:]
    return pattern


def _of_mamba(segment: Segment) -> set[DeltaNetConfig]:
    """Of Mamba 2, and lightning attention, which is computed as that is."""
    return {mixer for mixer in _mixers(segment) if not getattr(mixer, "takes_back", True)}


def _mixers(segment: Segment) -> list:
    """Of all layers of a pattern, what mixes tokens."""
    return [mixer for block in segment.pattern for mixer in block.mixers]


def _shared(sketch: Sketch, segment: Segment) -> bool:
    """Whether devices share groups of its heads."""
    ways = sketch.mesh.size("tensor", "context")
    return any(attention.num_kv_heads % ways for attention in _of_mamba(segment))


def _one_axis(sketch: Sketch) -> bool:
    """Whether tensor or context splits heads, and not both."""
    return (sketch.mesh.tensor > 1) != (sketch.mesh.context > 1)


def _experts(sketch: Sketch, layers: Sequence[Layer]) -> float:
    if "all_to_all" in exchanges(sketch):
        return SENT * sum(one.rows for one in layers)
    return max(4 * one.expert_hidden + 5 * one.rows for one in layers)
