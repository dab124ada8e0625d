"""Bytes of a step at its output head, on one device: the loss makes its gradient while all that the forward pass kept
is there (temporaries.py). What of it waits until the layers are done is here too, and which zeros are made before."""

import math

from shardlm.ops.cross_entropy import CHUNK_BYTES
from shardlm.plan.activations import WIDE, Kinds, itemsize
from shardlm.plan.parts import Parts
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import MASTER


def at_head(sketch: Sketch, parts: Parts) -> Kinds:
    """The head in the compute type and its gradient in float32, twice as the loop over chunks is unrolled twice (one
    chunk's waits, `waiting`); a chunk's logits; of the layer that begins the backward pass what is made again
    meanwhile."""
    size, mesh, one = itemsize(sketch), sketch.mesh, parts.layers[-1][-1]
    stages = mesh.pipeline > 1 and not sketch.schedule.both_ways
    rows = at_once(sketch)
    logits, chunks = logits_of(sketch)
    # Zeros of the embedding's gradient, in float32.
    many = WIDE * ((2 if chunks > 1 else 0) + (size == WIDE)) + size
    if sketch.adapters:  # neither has a gradient, and both rest in the compute type
        many = size * parts.gathers
    found = {
        "head": sketch.shape.vocab_size / mesh.tensor * sketch.shape.embed_dim * many,
        "logits": logits / chunks * (size if chunks > 1 else size + WIDE),
        **_of_teacher(sketch),
    }
    if stages:
        # XLA's scheduler makes the zeros that a stage's gradients are added to during the last exchange before its
        # backward pass that nothing else covers: before the head, as its weights are gathered, but for a sequence that
        # tensor scatters behind the head, where neither what was kept is read meanwhile nor experts begin. All rows of
        # a device are held in temporaries.py, but for what is whole over tensor: what the head reads, and its gradient.
        behind = mesh.tensor > 1 and sketch.config.remat not in ("none", "dots") and not one.rows
        streams = 4 * one.stream + 2 * rows * (one.whole - one.stream)
        return found | {"gradients": 0 if behind else parts.resting, "streams": streams}
    # What is made again waits for the head's gradient (layers/stack.py), but in stages, and with weights from the host.
    free = mesh.pipeline > 1 or sketch.config.offload.params or sketch.config.remat == "none"
    ahead = free and sketch.config.remat != "offload"
    # In a tick of 1F1B the stage's last layer is made again meanwhile, beside what comes from its neighbours.
    both = mesh.pipeline > 1
    again = one.queries + one.keys + one.output if both else 0
    # A mask of chosen tokens is made beside an exchange over context, behind the head; so it is not for scores.
    mask = 0 if mesh.context > 1 and not both and sketch.execution.attention == "cudnn" else one.mask
    # While the head's weights come, experts' of two layers are turned for their kernels, for the forward pass that is
    # made again and for the backward pass, if they have come before.
    come = sketch.shape.vocab_size * sketch.shape.embed_dim * size >= parts.experts
    turned = 4 * parts.experts if come and mesh.tensor == mesh.pipeline == 1 else 0
    return found | {
        "gradients": -zeros_behind(sketch, parts),
        "attention": mask + again,
        "streams": (5 + 3.5 * ahead + 3.5 * both) * one.stream,
        "weights in use": max(0.8 * parts.largest, turned) * ahead,
    }


def _of_teacher(sketch: Sketch) -> Kinds:
    """A teacher's head in the compute type, and what it reads."""
    if not sketch.config.distill.teacher:
        return {}
    teacher, size = sketch.beside, itemsize(sketch)
    numbers = teacher.shape.vocab_size / teacher.mesh.tensor + teacher.tokens
    return {"teacher": numbers * teacher.shape.embed_dim * size}


def zeros_behind(sketch: Sketch, parts: Parts) -> float:
    """Bytes of the zeros that layers' gradients are added to that are made behind the head. Where layers are made again
    from their input, XLA makes zeros while the head's weights come until the gather is covered, those of the MLP and no
    more (Llama 3 8B over 8 GPUs: with 8,192 tokens of gate, up and down, 2.6 of 3.3 GiB, with 4,096 of two of them);
    over several hosts none, as gathers go a layer ahead: the last layer is in no loop, and its work covers the head's
    (over 16 and 32 GPUs; compiled)."""
    if sketch.mesh.pipeline > 1 or not sketch.loops:
        return 0
    if _zeros_later(sketch):
        return parts.added
    gathered = parts.gathers and not sketch.config.offload.params and not sketch.adapters
    if not gathered or sketch.config.remat not in ("full", "offload"):
        return 0
    if sketch.num_gpus > sketch.gpus_per_host:
        return parts.resting
    if sketch.passes > 1 or sketch.shape.remembers:  # of linear attention and several microbatches all (compiled)
        return 0
    layers = (w for w in sketch.weights if w.trained and w.segment is not None and ".mlp." not in w.path)
    return MASTER * sum(weight.numbers(sketch.rules.rest) for weight in layers)


def _zeros_later(sketch: Sketch) -> bool:
    """Whether they are made behind the head because something waits there: while
    tensor scatters the sequence, experts' rows are exchanged or, of layers that are made again from their input, tokens
    over context. Else while the head's weights come."""
    mesh = sketch.mesh
    return mesh.tensor > 1 or mesh.expert > 1 or (mesh.context > 1 and sketch.config.remat == "full")


def at_once(sketch: Sketch) -> float:
    """Microbatches that layers outside the stages and the head have at once."""
    stages = sketch.mesh.pipeline > 1 and not sketch.schedule.both_ways
    return sketch.passes / sketch.mesh.pipeline if stages else 1


def logits_of(sketch: Sketch) -> tuple[float, int]:
    """How many a device has at the head, and in how many chunks, in which those of a teacher are too."""
    logits = sketch.tokens * at_once(sketch) * sketch.shape.vocab_size / sketch.mesh.tensor
    both = 2 if sketch.config.distill.teacher else 1
    return logits, math.ceil(both * logits * WIDE / CHUNK_BYTES)


def waiting(sketch: Sketch, head: float) -> Kinds:
    """What the head leaves to the layers' backward pass: `head` bytes of its gradient; of a single chunk of logits,
    which is in no loop, XLA makes that only when nothing else is left, and keeps the logits' gradient."""
    logits, chunks = logits_of(sketch)
    if sketch.adapters:
        return {"head": 0, "logits": 0}
    return {"head": head, "logits": 0} if chunks > 1 else {"head": 0, "logits": logits * itemsize(sketch)}
