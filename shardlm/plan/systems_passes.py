"""Passes over memory that other systems make beside the kernels of compute.py: queries and keys are split, normed and
rotated, logits become a loss, microbatches' gradients are added up. Counted from their sources, one rule for all points
of a system; what XLA and torch.compile fuse is one pass.

Megatron (github.com/NVIDIA/Megatron-LM, megatron/core): transformer/attention.py splits the joint product, and copies
queries of groups (`reshape`) and values; fusions/fused_mla_yarn_rope_apply.py rotates latent attention's queries in
place and writes keys and values from their joint product. The loss is fusions/fused_cross_entropy.py, or Transformer
Engine's where recipes say cross_entropy_fusion_impl="te" (Megatron Bridge's). Weights' gradients are added by the
product itself (gradient_accumulation_fusion), in 16 bits where recipes set grad_reduce_in_fp32=False, and 8-bit weights
are kept for all microbatches (extensions/transformer_engine.py, is_first_microbatch).

NeMo AutoModel (github.com/NVIDIA-NeMo/Automodel): components/models/*/layers.py of commits 0d3163d2 and 0b5d3f7c have
queries, keys and values of products of their own, norms and rotation by Transformer Engine, and `torch.cat` of latent
heads; components/loss/masked_ce.py takes F.cross_entropy of bfloat16. PyTorch adds a further microbatch's gradient in a
pass of its own.
"""

import dataclasses
from collections.abc import Iterator

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.mla import MlaConfig
from shardlm.plan.constants import GAP
from shardlm.plan.op import Op
from shardlm.plan.published import Model, Point
from shardlm.plan.sketch import Sketch
from shardlm.plan.systems import AUTOMODEL, BRIDGE, MEGATRON, RECIPES, Recomputed

# Bytes of a logit, forward and backward, besides its products'. Transformer Engine: read, read and gradient written;
# read and written with the loss's. Megatron's own in float32: cast, largest, difference and exponential in place, sum,
# quotient; gradient in place, cast. PyTorch's softmax of long rows: three reads and a write; the gradient of the chosen
# ones written whole, read twice beside the softmax, and written. Compiled: two reads, and a read and a write.
LOSS = {BRIDGE: (6, 4), **dict.fromkeys(set(MEGATRON) - {BRIDGE}, (22, 14)), AUTOMODEL: (8, 10)}
COMPILED = (4, 4)
ADDED = 6  # bytes of a gradient that PyTorch adds to another in bfloat16


def heads_ops(point: Point, model: Model, sketch: Sketch, policy: Recomputed) -> Iterator[Op]:
    """What happens to queries, keys and values between their products and attention."""
    passes = sketch.passes / sketch.mesh.pipeline
    again = 1 if point.remat == "full" else 0 if point.framework in MEGATRON else policy.memory
    blocks = [block.attention for block in sketch.shape.all_blocks()]
    for attention in dict.fromkeys(blocks):
        forward, backward, kernels = _of_heads(point, model, attention, sketch.mesh.tensor)
        if forward:
            runs = passes * blocks.count(attention)
            yield Op(
                *("attention", "split, normed and rotated", "memory", 0, sketch.itemsize * sketch.tokens * forward),
                runs * (2 + again),
                runs,
                runs * again,
                in_stages=sketch.mesh.pipeline > 1,
                host=(kernels - 1) * GAP,
                gradient_bytes=sketch.itemsize * sketch.tokens * backward,
            )


def _of_heads(
    point: Point, model: Model, attention: AttentionConfig | MlaConfig, tensor: int
) -> tuple[float, float, int]:
    """(numbers of a token that are read and written forward, backward, kernels of a pass)."""
    heads = attention.num_heads / tensor
    eager = point.framework == AUTOMODEL
    if isinstance(attention, MlaConfig):
        R, nope, V = attention.rope_dim, attention.nope_dim, attention.value_dim
        if point.framework in MEGATRON:
            both = heads * (2 * R + (nope + V) + (nope + R + V))
            return both, both, 2
        # The rotated part; queries joined; keys joined; values made contiguous. Back: their joint gradient.
        forward = heads * (2 * R + 2 * (nope + R) + (2 * nope + R) + 2 * V)
        return forward, heads * (2 * R + 2 * (nope + R) + R + 2 * (nope + V)), 6
    if attention.rope is None:
        return 0, 0, 0
    q, k = heads * attention.head_dim, max(1, attention.num_kv_heads / tensor) * attention.head_dim
    forward = backward = 2 * (q + k)  # rotated
    kernels = 2
    if model.normed:
        forward, backward, kernels = forward + 2 * (q + k), backward + 3 * (q + k), kernels + 2
    if eager and "gpt-oss" in model.name:  # Yarn's factor, by itself
        forward, backward, kernels = forward + 2 * (q + k), backward + 2 * (q + k), kernels + 2
    if point.framework in MEGATRON:
        forward, backward, kernels = forward + 2 * (q + k), backward + 2 * (q + 2 * k), kernels + 2
    return forward, backward, kernels


def loss_op(point: Point, sketch: Sketch) -> Op:
    """From logits to a loss and their gradient, once for each head."""
    forward, backward = LOSS.get(point.framework, COMPILED)
    heads = 1 + (sketch.shape.mtp.depth if sketch.shape.mtp else 0)
    runs = sketch.passes * heads / sketch.mesh.pipeline
    logits = sketch.tokens * sketch.shape.vocab_size / sketch.mesh.tensor
    return Op("head", "loss", "memory", 0, forward * logits, 2 * runs, runs, gradient_bytes=backward * logits)


def added_ops(point: Point, sketch: Sketch) -> Iterator[Op]:
    """Gradients of all microbatches but the first, added to those before."""
    if point.framework != AUTOMODEL or sketch.passes == 1:
        return
    held = (w.numbers(sketch.rules.use) / (sketch.mesh.pipeline if sketch.staged(w) else 1) for w in sketch.weights)
    runs = sketch.passes - 1
    yield Op("mlp", "gradients added", "memory", 0, ADDED * sum(held), runs, runs, in_stages=sketch.mesh.pipeline > 1)


def as_multiplied(ops: list[Op], point: Point) -> Iterator[Op]:
    """Megatron's products: weights cast once a step, gradients added to what is there."""
    for op in ops:
        if op.unit == "matmul" and point.framework in MEGATRON:
            numbers = op.flops / (2.0 * op.dims[0])  # of all copies
            more = 2 if point.framework in RECIPES else 6  # compute.py writes 16 bits
            op = dataclasses.replace(op, cast_weights=1 / point.microbatches, added_bytes=more * numbers)
        yield op
