"""Bytes that a step with entries of several tokens and several streams (DeepSeek V4) needs, beside what rests and what
layers keep, while layers are done backwards. How many arrays there are is read from the buffer assignments of compiled
programs (doubt.py says how many)."""

from collections.abc import Sequence

from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.plan.activations import WIDE, Kinds, Layer, exchanges
from shardlm.plan.compressed_attention import Blocks
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch

# Of each block of a pattern, all of which are in one loop: XLA makes weights' gradients late, so that of all of them
# there are streams, some of them in float32, queries with their gradients, and arrays as wide as the stream of a layer.
STREAMS, QUERIES, NARROW = 4, 5, 11
SENT = 8.5  # arrays of rows that were sent to their experts, of each block
HOLES = 1.15  # of what is there at once over several hosts, with what lies between (12 to 25% in 3 programs)
SCORES = 2.5  # float32 arrays of the scores of a block of queries


def at_work(sketch: Sketch, parts: Parts) -> Kinds:
    """{} where the model has no such layers."""
    found = [
        (pattern, layers)
        for segment, layers in zip(sketch.shape.segments, parts.layers, strict=True)
        if isinstance((pattern := segment.pattern)[0].attention, CompressedConfig)
    ]
    kinds = max((_of(sketch, parts, *one) for one in found), key=lambda kinds: sum(kinds.values()), default={})
    over_hosts = sketch.num_gpus > sketch.gpus_per_host
    return {name: nbytes * (HOLES if over_hosts else 1) for name, nbytes in kinds.items()}


def _of(sketch: Sketch, parts: Parts, pattern, layers: tuple[Layer, ...]) -> Kinds:
    tensor, over_hosts = sketch.mesh.tensor, sketch.num_gpus > sketch.gpus_per_host
    scores = [WIDE * Blocks.of(block.attention, sketch).at_once for block in pattern]
    fullest = max(layers, key=lambda one: one.rows)
    latents = sum(one.latents for one in layers)
    if "all_to_all" in exchanges(sketch):
        experts = SENT * sum(one.rows for one in layers) + 3 * fullest.expert_hidden
    else:  # more where tensor scatters the sequence, tokens of several devices are gathered, or weights cross hosts
        wide, several = tensor > 1, sketch.mesh.expert > 1
        rows = 2 + 2 * wide + 2.5 * several + 3 * (over_hosts and not several)
        experts = rows * fullest.rows + (6 if wide or several else 3) * fullest.expert_hidden
    return {
        "streams": of_streams(layers, tensor),
        "attention": QUERIES * sum(one.queries for one in layers) + SCORES * max(scores) + 2 * latents,
        "mlp": 6 * sum(one.hidden for one in layers),
        "experts": experts,
        "weights in use": parts.largest * ((2 if over_hosts else 1.5) * len(pattern) if parts.gathers else 1),
    }


def of_streams(layers: Sequence[Layer], tensor: int) -> float:
    """Bytes of several streams while layers of a pattern are done backwards."""
    return STREAMS * sum(one.stream for one in layers) + NARROW * sum(one.whole for one in layers) / tensor
