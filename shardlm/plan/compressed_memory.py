"""Bytes that a step with entries of several tokens and several streams (DeepSeek V4) needs, beside what rests and what
layers keep, while layers are done backwards. How many arrays there are is read from the buffer assignments of compiled
programs (doubt.py says how many)."""

from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.plan.activations import WIDE, Kinds, Layer, exchanges
from shardlm.plan.compressed_attention import Blocks
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch

# Of each block of a pattern, all of which are in one loop: XLA makes weights' gradients late, so that of all of them
# there are streams, half of them in float32, queries with their gradients, and arrays as wide as the stream of a layer.
STREAMS, QUERIES, NARROW = 8, 4.5, 11
SENT = 8.5  # arrays of rows that were sent to their experts, of each block
SCORES = 2.5  # float32 arrays of the scores of a block of queries


def at_work(sketch: Sketch, parts: Parts) -> Kinds:
    """{} where the model has no such layers."""
    found = [
        (pattern, layers)
        for segment, layers in zip(sketch.shape.segments, parts.layers, strict=True)
        if isinstance((pattern := segment.pattern)[0].attention, CompressedConfig)
    ]
    return max((_of(sketch, parts, *one) for one in found), key=lambda kinds: sum(kinds.values()), default={})


def _of(sketch: Sketch, parts: Parts, pattern, layers: tuple[Layer, ...]) -> Kinds:
    tensor = sketch.mesh.tensor
    scores = [WIDE * Blocks.of(block.attention, sketch).at_once for block in pattern]
    fullest = max(layers, key=lambda one: one.rows)
    latents = sum(one.latents for one in layers)
    if "all_to_all" in exchanges(sketch):
        experts = SENT * sum(one.rows for one in layers) + 3 * fullest.expert_hidden
    else:  # more of them where tensor scatters the sequence or tokens of several devices are gathered
        wide, several = tensor > 1, sketch.mesh.expert > 1
        experts = (2 + 2 * wide + 2.5 * several) * fullest.rows + (6 if wide or several else 3) * fullest.expert_hidden
    return {
        "streams": STREAMS * sum(one.stream for one in layers) + NARROW * sum(one.whole for one in layers) / tensor,
        "attention": QUERIES * sum(one.queries for one in layers) + SCORES * max(scores) + 2 * latents,
        "mlp": 6 * sum(one.hidden for one in layers),
        "experts": experts,
        "weights in use": parts.largest * (1.5 * len(pattern) if parts.gathers else 1),
    }
