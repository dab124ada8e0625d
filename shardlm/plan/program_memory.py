"""What our program's kernels move in a GPU's memory besides what layers compute: weights on their way to layers and
their gradients on the way back, what the optimizer turns, what layers keep, and kernels so small that only their number
counts. As XLA fuses them for H100; stages' own are compute.py's."""

import functools
from collections.abc import Iterator

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig
from shardlm.ops.ring_attention import stops
from shardlm.plan import linear_attention
from shardlm.plan.activations import kept, layer
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.spread import Spread
from shardlm.rules import Rules

WIDE = 4  # bytes of a float32
# Kernels of a layer's forward pass, as many again where it is made again, and twice as many for gradients: of 32 layers
# of Llama 3 8B 105 in all, in other dense ones 115 to 144; of mixtures 190 to 254 (jax 0.10.2, remat=full).
KERNELS, KERNELS_OF_EXPERTS = 26, 55


def of_block(sketch: Sketch, block: BlockConfig, ops: int) -> Iterator[Op]:
    """Of a layer with so many operations, forward, once: queries and keys are turned by their positions."""
    for mixer in block.mixers:
        yield from _mixing(sketch, mixer)
    kernels = (KERNELS_OF_EXPERTS if isinstance(block.mlp, MoeConfig) else KERNELS) - ops
    yield Op("other", "small kernels", "memory", 0, 0, 1, host=(kernels - 1) * GAP)


def _mixing(sketch: Sketch, attention) -> Iterator[Op]:
    if isinstance(attention, AttentionConfig):
        heads, kv = attention.num_heads / sketch.mesh.tensor, max(1, attention.num_kv_heads / sketch.mesh.tensor)
        turned = 2 * sketch.itemsize * sketch.tokens * (heads + kv) * attention.head_dim
        yield Op("attention", "positions", "memory", 0, turned, 1, gradient_bytes=turned)
    if isinstance(attention, DeltaNetConfig):
        yield from linear_attention.moved_by(attention, sketch)
    elif sketch.mesh.context > 1 and sketch.execution.context_attention == "ring":
        yield ring(sketch, attention)


def meetings(sketch: Sketch, attention: AttentionConfig | MlaConfig) -> int:
    """Moves of a ring, after each of which keys and values meet queries."""
    context = sketch.mesh.context
    return len(stops(context, sketch.config.train.seq_len // (2 * context), attention.window))


def ring(sketch: Sketch, attention: AttentionConfig | MlaConfig) -> Op:
    """Between the moves of a ring, in float32: of each part of the output that is cast, added to what is there and
    copied, and a mask; for gradients of queries alike, and of keys and values, which go on (ops/attention_pair.py)."""
    mesh, tokens = sketch.mesh, sketch.tokens
    moves = meetings(sketch, attention)
    heads, kv = attention.num_heads / mesh.tensor, max(1, attention.num_kv_heads / mesh.tensor)
    output = WIDE * tokens * heads * attention.value_dim
    queries = WIDE * tokens * heads * attention.head_dim
    visitors = WIDE * tokens * kv * (attention.head_dim + attention.value_dim)
    there = (6.5 * moves + 3) * output
    back = (5 * moves + 3) * queries + 9 * moves * visitors
    return Op("attention", "ring", "memory", 0, there, 1, gradient_bytes=back)


def of_losses(sketch: Sketch) -> float:
    """Bytes that cross-entropy reads of its logits besides the products' own: for the largest, for the sum and, as it
    makes their gradients, twice more."""
    return 4 * WIDE * sketch.tokens * sketch.shape.vocab_size / sketch.mesh.tensor


def of_weights(sketch: Sketch) -> Iterator[Op]:
    """Weights are cast where they are used, of layers in the backward pass again. A layer's gradient is written into
    all layers' in float32, zeros at first; what microbatches gave is added up."""
    passes = 1 if sketch.mesh.pipeline > 1 else sketch.passes
    several = sketch.passes > 1 and sketch.mesh.pipeline == 1
    stages = sketch.shape.pipelined_segment() if sketch.mesh.pipeline > 1 else None
    forward, backward = _moved(sketch.spread, sketch.itemsize, several, stages, sketch.shape.tie_embeddings)
    how = {"count": 2 * passes, "forward": passes}
    yield Op("other", "weights and gradients", "memory", 0, forward, gradient_bytes=backward, **how)
    if sketch.mesh.pipeline == 1 and sketch.loops:
        yield _stacks(sketch)


@functools.lru_cache(maxsize=4096)
def _moved(spread: Spread, size: int, several: bool, stages: int | None, tied: bool) -> tuple[float, float]:
    """Bytes of a pass, forward and backward: of a run of `several` microbatches, `stages` being the segment that is in
    them, and with an embedding that is the head too."""
    forward = backward = 0.0
    for i, weight in enumerate(spread.weights):
        if not (weight.trained and weight.is_matrix):
            continue
        rests, used = spread.rest[i], spread.use[i]
        cast = (WIDE + size) * rests if size < WIDE else 0
        forward += cast
        if stages is not None and weight.segment == stages:
            continue
        added = 3 * WIDE * weight.numbers(spread.rules.grads) if several else 0
        if weight.path == "embedding":  # zeros, to which rows are added
            forward += cast if tied else 0
            backward += 3 * size * used + (WIDE * used if tied else 0) + added
        elif not weight.stacked:
            backward += WIDE * used + added
        else:
            turned = 2 * size * used if _turned(weight, spread.rules) else 0
            backward += cast + (size + 2 * WIDE) * rests + turned + added
    return forward, backward


def _turned(weight: Weight, rules: Rules) -> bool:
    """Whether its gradient leaves the product the other way round than it rests: what an embedding's dimension is
    summed over, and where it is not scattered, all; experts' are compute.py's."""
    names = weight.names[weight.stacked :]
    if "experts" in names or "router" in names:
        return False
    return names[0] == "embed" or rules.rest.split(weight.names) == rules.use.split(weight.names)


def _stacks(sketch: Sketch) -> Op:
    """What layers keep is written into what all keep, zeros at first, and taken from there."""
    nbytes = sum(
        segment.repeats * sum(sum(kept(layer(block, sketch), sketch).values()) for block in segment.pattern)
        for segment in sketch.shape.segments
    )
    return Op(
        *("other", "stacks", "memory", 0, 2 * nbytes),
        count=2 * sketch.passes,
        forward=sketch.passes,
        gradient_bytes=3 * nbytes,
    )


def of_update(sketch: Sketch) -> Iterator[Op]:
    """Gradients are read for their norm. Where the optimizer's state is split and weights are not, XLA gathers what is
    new by the first dimension of all: it turns weights and both moments there, and back what was gathered."""
    norm, turned = _updated(sketch.spread)
    yield Op("optimizer", "norm", "memory", 0, norm, 1)
    yield Op("optimizer", "updated weights turned", "memory", 0, turned, 1)


@functools.lru_cache(maxsize=4096)
def _updated(spread: Spread) -> tuple[float, float]:
    """Bytes that the norm and what is turned move."""
    rules = spread.rules
    norm = turned = 0.0
    for weight, rests, updated in zip(spread.weights, spread.rest, spread.optimizer, strict=True):
        if not weight.trained:
            continue
        norm += WIDE * updated
        gathered = set(rules.optimizer.split(weight.names)) - set(rules.rest.split(weight.names))
        if gathered and weight.is_matrix and not gathered & set(rules.optimizer.axes(weight.names[0])):
            turned += 2 * WIDE * (rests + 2 * updated)
    return norm, turned
