"""Bytes that one device needs in a training step: what rests, exactly, and the least of what a step needs besides."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.optim import OptimConfig
from shardlm.plan.sketch import Sketch, Weight
from shardlm.plan.traffic import MASTER, WEIGHT


@dataclasses.dataclass(frozen=True)
class State:
    """What rests between steps, in bytes of one device.

    weights    float32, or as adapters' base is held
    optimizer  its moments
    average    of the weights (optim.ema_decay)
    """

    weights: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


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


def state(sketch: Sketch) -> State:
    """Of one device's part of the training state, scalars left out."""
    rules, optim = sketch.rules, sketch.config.optim
    trained = [weight for weight in sketch.weights if weight.trained]
    weights = sum(weight.numbers(rules.rest) * weight.itemsize for weight in sketch.weights)
    moments = sum(moments_of(weight, optim) * weight.numbers(rules.optimizer) for weight in trained)
    average = sum(weight.numbers(rules.optimizer) for weight in trained) if optim.ema_decay else 0
    return State(weights, moments * MASTER, average * MASTER)


def state_bytes(sketch: Sketch) -> int:
    """The same in one number."""
    return state(sketch).total


def moments_of(weight: Weight, optim: OptimConfig) -> int:
    """float32 numbers that the optimizer keeps for each number of a weight."""
    if optim.name == "adamw":
        return 2
    if optim.name == "lion":
        return 1
    if optim.name == "sgd":
        return 1 if optim.b1 else 0
    raise ShardlmError(f"the memory of optim.name={optim.name} is not known here yet")


def least_temporaries(sketch: Sketch) -> Least:
    """For remat full and a 16-bit run."""
    rules, mesh, config, shape = sketch.rules, sketch.mesh, sketch.config, sketch.shape
    stream = sketch.tokens / mesh.tensor * shape.embed_dim * WEIGHT
    segment = shape.segments[shape.pipelined_segment()]
    outside = shape.cached_layers - segment.num_layers
    used = sum(weight.numbers(rules.use) for weight in sketch.weights)
    resting = sum(weight.numbers(rules.grads) * max(1, _pipelined(weight, sketch)) for weight in sketch.weights)
    gathered = rules.rest.axes("embed") not in ((), ("pipeline",))
    layer = used / shape.cached_layers
    under_way = sketch.passes if mesh.pipeline > 1 else 1
    if config.pipeline.schedule == "1f1b" and mesh.pipeline > 1:
        inputs = (2 * mesh.pipeline - 1 + segment.repeats / mesh.pipeline) * stream  # of stages, and of one's blocks
    else:
        inputs = (segment.num_layers / mesh.pipeline * under_way + outside) * stream
    chunk = min(sketch.tokens * shape.vocab_size / mesh.tensor * 4, 128 * 2**20)
    weights = 2 * layer * WEIGHT if gathered else used / mesh.pipeline * WEIGHT
    return Least(inputs, weights, resting / mesh.pipeline * MASTER, chunk)


def _pipelined(weight: Weight, sketch: Sketch) -> int:
    return sketch.mesh.pipeline if "pipeline" in weight.axes(sketch.rules.grads) else 1


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device in a step, by what they are for; what is alive at its fullest moment.

    reserve  what the runtime, NCCL's buffers and fragmentation take besides
    """

    kinds: dict[str, float]
    reserve: float

    @property
    def total(self) -> float:
        return sum(self.kinds.values()) + self.reserve


RESERVE = 0.08  # of a GPU's memory


def memory(sketch: Sketch) -> Memory:
    """The estimate for a step."""
    rests, least = state(sketch), least_temporaries(sketch)
    kinds = {
        "weights": rests.weights,
        "optimizer": rests.optimizer,
        "average of weights": rests.average,
        "gradients": least.gradients,
        "weights in use": least.weights,
        "activations": least.inputs,
        "logits": least.logits,
    }
    return Memory({name: nbytes for name, nbytes in kinds.items() if nbytes}, RESERVE * sketch.gpu.hbm_bytes)
