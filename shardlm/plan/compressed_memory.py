"""Bytes that a step with entries of several tokens and several streams (DeepSeek V4) needs, beside what rests and what
layers keep, while layers are done backwards. How many arrays there are is read from the buffer assignments of compiled
programs (doubt.py says how many)."""

from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.plan import compressed_attention
from shardlm.plan.activations import WIDE, Kinds, Layer, itemsize
from shardlm.plan.compressed_attention import Blocks
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch

# Of each block of a pattern, all of which are in one loop: XLA makes weights' gradients late, so that of all of them
# there are streams, half of them in float32, queries with their gradients, and arrays as wide as the stream of a layer.
STREAMS, QUERIES, NARROW = 8, 4.5, 11
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
    each = sketch.tokens * itemsize(sketch)
    scores = [WIDE * Blocks.of(block.attention, sketch).at_once for block in pattern]
    latents = sum(
        each * (block.attention.q_latent_dim + sum(compressed_attention.numbers(block.attention, sketch)))
        for block in pattern
    )
    fullest = max(layers, key=lambda one: one.rows)
    return {
        "streams": STREAMS * sum(one.stream for one in layers) + NARROW * sum(one.whole for one in layers) / tensor,
        "attention": QUERIES * sum(one.queries for one in layers) + SCORES * max(scores) + 2 * latents,
        "mlp": 6 * sum(one.hidden for one in layers),
        "experts": 3 * fullest.expert_hidden + 2 * fullest.rows,
        "weights in use": parts.largest * (1.5 * len(pattern) if parts.gathers else 1),
    }
