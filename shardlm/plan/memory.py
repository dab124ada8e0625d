"""Bytes that one device needs in a training step: what rests, exactly, and the least of what a step needs besides."""

import dataclasses
import math
from typing import Any

import jax

from shardlm.plan.traffic import MASTER, WEIGHT


@dataclasses.dataclass(frozen=True)
class Least:
    """The least temporaries of a step, in bytes.

    inputs     of blocks (remat full), of all microbatches that are under way
    weights    in 16 bits: of two layers where they are gathered layer by layer, else of all that the device computes
    gradients  float32, as they rest; whole where they are summed over microbatches before they are split
    logits     float32, of one chunk
    """

    inputs: float
    weights: float
    gradients: float
    logits: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def state_bytes(program: Any) -> int:
    """Of one device's part of the training state. `program` is a train/program.py Program."""
    leaves = jax.tree.leaves(program.state_shapes())
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def least_temporaries(program: Any) -> Least:
    """For remat full and a 16-bit run."""
    rules, mesh, config, shape = program.rules, program.rules.mesh, program.config, program.model.config
    train = config.train
    rows = train.global_batch / train.accumulation / mesh.size("data", "fsdp", "expert")
    stream = rows * train.seq_len / mesh.size("context", "tensor") * shape.embed_dim * WEIGHT
    segment = shape.segments[shape.pipelined_segment()]
    outside = shape.cached_layers - segment.num_layers
    used = resting = 0.0
    for leaf, (_, names) in zip(
        jax.tree.leaves(program.model.shapes),
        jax.tree.leaves(program.model.names, is_leaf=lambda x: isinstance(x, tuple)),
        strict=True,
    ):
        use, grads = ({axis for name in names for axis in table.axes(name)} for table in (rules.use, rules.grads))
        used += math.prod(leaf.shape) / mesh.size(*use)
        resting += math.prod(leaf.shape) / mesh.size(*(grads - {"pipeline"}))
    gathered = rules.rest.axes("embed") not in ((), ("pipeline",))
    layer = used / shape.cached_layers
    under_way = train.accumulation if mesh.pipeline > 1 else 1
    if config.pipeline.schedule == "1f1b" and mesh.pipeline > 1:
        inputs = (2 * mesh.pipeline - 1 + segment.repeats / mesh.pipeline) * stream  # of stages, and of one's blocks
    else:
        inputs = (segment.num_layers / mesh.pipeline * under_way + outside) * stream
    tokens = rows * train.seq_len / mesh.context
    chunk = min(tokens * shape.vocab_size / mesh.tensor * 4, 128 * 2**20)
    weights = 2 * layer * WEIGHT if gathered else used / mesh.pipeline * WEIGHT
    return Least(inputs, weights, resting / mesh.pipeline * MASTER, chunk)
