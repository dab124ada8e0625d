"""What a mixture of experts moves in memory beside its products: rows between the orders of tokens and experts, and
weights that a kernel wants turned. Products are compute.py's, what is sent traffic.py's."""

import math
from collections.abc import Iterator

from shardlm.layers.moe import MoeConfig, dispatch_of
from shardlm.plan.op import Op
from shardlm.plan.program_layers import filled
from shardlm.plan.sketch import Sketch

# Of what sorts by experts, bytes that memory moves while a core compares two numbers: 5 ns.
COMPARED = 40


def moved(sketch: Sketch, moe: MoeConfig) -> Iterator[Op]:
    """Of a layer, forward, once."""
    yield from _on_cpu(sketch, moe) if sketch.gpu.generation == "cpu" else _on_gpu(sketch, moe)


def _on_gpu(sketch: Sketch, moe: MoeConfig) -> Iterator[Op]:
    """What experts' program moves beside its products, forward and for gradients, as XLA fuses it for H100
    (ops/expert_dispatch.py, ops/grouped_matmul.py). Of the rows R that buffers have room for, full or not, and the n
    tokens that they come from: forward, rows are taken from tokens and results from rows; backward, rows of the input
    and of the output's gradient, the input's turned too, the sum of two gradients, and sums for tokens and for the
    router. Sent to their experts they are moved between buffers besides, by compiled programs of 16 devices of 64
    experts: 20 for each row of a buffer and 8 for each pair of a token and an expert; and an exchange writes into
    zeros, copied for each of five from those that XLA makes before the loop: 10 for each row.

    Weights: the kernels want both of a product's operands one way round, so that they are turned for gradients of rows,
    and gradients of weights are passed over for empty experts. Gathered by another dimension than their first, of more
    than one expert, they are turned as they come, both times, and their gradients as they leave."""
    D, F, ranks = moe.read_dim(sketch.shape.embed_dim), moe.expert_dim / sketch.mesh.tensor, sketch.mesh.expert
    pairs = sketch.tokens * moe.working
    room = pairs / filled(moe, ranks, sketch.tokens)
    exchange = dispatch_of(moe, sketch.execution).exchange
    if exchange == "all_to_all":
        there, back = 9 * room + 2 * pairs, 12 * room + 4 * pairs
    else:
        tokens = sketch.tokens * (ranks if exchange == "gather" else 1)
        there, back = 2 * (room + tokens), 6 * room + 2 * tokens
    matrices = len(moe.projections)
    forward = sketch.itemsize * (there * D + matrices * room * F)
    gradients = sketch.itemsize * (back * D + (matrices + 1) * room * F)
    yield Op("moe", "activation and moving", "memory", 0, forward, 1, gradient_bytes=gradients)
    weights = 2 * sketch.itemsize * matrices * moe.num_experts / ranks * D * F
    turned = weights if experts_gathered(sketch) and moe.num_experts > ranks else 0
    yield Op("moe", "weights turned", "memory", 0, turned, 1, gradient_bytes=2 * weights + turned)


def _on_cpu(sketch: Sketch, moe: MoeConfig) -> Iterator[Op]:
    """The same as ops/expert_dispatch.py and ops/grouped_matmul.py's blocks say it, where XLA:CPU leaves each pass a
    kernel: of a product's rows the padded operand, zeros to write into and, of the result, those that count; rows
    taken, sorted, brought back and summed by their weights. R are the rows of buffers, p pairs of a token and an
    expert, n the tokens that they come from. Sent, rows lie in two more buffers, and whole ones travel."""
    D, F, ranks = moe.read_dim(sketch.shape.embed_dim), moe.expert_dim / sketch.mesh.tensor, sketch.mesh.expert
    into, exchange = len(moe.projections) - 1, dispatch_of(moe, sketch.execution).exchange
    n = sketch.tokens * (ranks if exchange == "gather" else 1)
    p, sent = n * moe.working, exchange == "all_to_all"
    R = sketch.tokens * moe.working / filled(moe, ranks, sketch.tokens)
    forward = (7 + 6 * sent) * R * D + (4 * into + 3) * R * F + (3 * p + n) * D
    gradients = (5 + 6 * into + 4 * sent) * R * D + (6 * into + 8) * R * F + (6 * p + n) * D
    sorted_rows = COMPARED * 1.5 * (_sorting(p) + (_sorting(R) if sent else 0))
    there, back = sketch.itemsize * forward + 2 * sorted_rows, sketch.itemsize * gradients
    yield Op("moe", "rows of experts", "memory", 0, there, 1, gradient_bytes=back)
    held = sketch.itemsize * len(moe.projections) * moe.num_experts / ranks * D * F
    turned = 2 * held if experts_gathered(sketch) and moe.num_experts > ranks else 0
    yield Op("moe", "weights turned", "memory", 0, turned, 1, gradient_bytes=2 * turned)


def _sorting(count: float) -> float:
    """Comparisons."""
    return count * math.log2(max(2.0, count))


def experts_gathered(sketch: Sketch) -> bool:
    """Whether experts' weights rest split by another dimension than their first, and are gathered."""
    rules = sketch.rules
    return bool(set(rules.rest.axes("expert_embed")) - set(rules.use.axes("expert_embed")) - {"pipeline"})
