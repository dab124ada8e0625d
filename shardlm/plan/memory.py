"""Bytes that one device needs in a training step, by what they are for: what rests (state.py), exactly, and what a step
needs besides (temporaries.py), within 5% of the compiled program's memory as a whole
(tests/plan/test_plan_matches_xla_memory.py); and what cuDNN's attention takes on a GPU that is there (workspace.py)."""

import dataclasses
import math

import jax.numpy as jnp

from shardlm.plan.activations import Kinds
from shardlm.plan.doubt import doubt
from shardlm.plan.sketch import Sketch
from shardlm.plan.state import State, state
from shardlm.plan.temporaries import Throughout, in_attention, joined, temporaries, throughout
from shardlm.plan.workspace import WORKSPACE

RESERVE = 0.08  # of a GPU's memory
ROUNDING = 1e-9  # of sums in another order


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device in a step, by what they are for; what is alive at its fullest moment.

    reserve  what the runtime, NCCL's buffers and fragmentation take besides
    host     bytes in the host's memory
    doubt    why the estimate may be farther than 5% from the compiled program; "" where nothing speaks for it
    """

    kinds: dict[str, float]
    reserve: float
    host: float = 0
    doubt: str = ""

    @property
    def total(self) -> float:
        return sum(self.kinds.values()) + self.reserve

    @property
    def without_gpu(self) -> float:
        """What a program has that is compiled without a GPU."""
        return sum(self.kinds.values()) - self.kinds.get(WORKSPACE, 0.0)


def at_least(sketch: Sketch, rests: State, held: Throughout) -> float:
    """Bytes that are no more than Memory.total."""
    return (1 - ROUNDING) * (rests.total + sum(held.kinds.values()) + RESERVE * sketch.gpu.hbm_bytes)


def memory(sketch: Sketch) -> Memory:
    """The estimate for a step."""
    kinds, zeros = _kinds(sketch)
    doubted = doubt(sketch, kinds, zeros)
    return Memory(kinds, RESERVE * sketch.gpu.hbm_bytes, sketch.once(state).host, doubted)


def total(sketch: Sketch) -> float:
    """Memory.total alone, which is all that most of a search's plans are asked."""
    return sum(_kinds(sketch)[0].values()) + RESERVE * sketch.gpu.hbm_bytes


def _kinds(sketch: Sketch) -> tuple[Kinds, float]:
    """Bytes by what they are for, and how many of these are zeros that XLA may make later."""
    rests = sketch.once(state)
    resting = {
        "weights": rests.weights,
        "frozen weights": rests.frozen,
        "optimizer": rests.optimizer,
        "average of weights": rests.average,
        "replicas": rests.replicas,
        "batch": rests.batch,
        "images": rests.images,
        # The host is the device.
        "on the host": rests.host if sketch.gpu.generation == "cpu" else 0,
    }
    needed, zeros = sketch.once(_temporaries)
    if sketch.config.grpo.reward:
        resting["what samples"] = sampling(sketch, rests, sum(needed.values()))
    return {name: nbytes for name, nbytes in (resting | needed).items() if nbytes}, zeros


def _temporaries(sketch: Sketch) -> tuple[Kinds, float]:
    held = sketch.once(throughout)
    kinds, zeros = temporaries(sketch, held)
    return kinds | {WORKSPACE: _workspace(sketch, held, sum(kinds.values()))}, zeros


def _workspace(sketch: Sketch, held: Throughout, fullest: float) -> float:
    """Of cuDNN's attention as it goes backwards, what is not there at the `fullest` moment anyway; in stages, in a ring
    and with chosen tokens, of which that is no moment of its own, all of it."""
    ones = [one for pattern in held.parts.layers for one in pattern]
    taken, biased = max(one.workspace for one in ones), max(one.bias for one in ones)
    moment = in_attention(sketch, held.parts) if taken else {}
    if not moment:
        return max(0.0, taken - biased)
    return max(0.0, sum(joined(held.kinds, moment).values()) - biased + taken - fullest)


def sampling(sketch: Sketch, rests: State, temporaries: float) -> float:
    """What copies of the model that sample (shardlm/reinforce/sampler.py) need beyond a step's `temporaries`, whose
    place they take: weights in the compute dtype and pages, which are held while they sample alone; of adapters the
    sums with what they stand on, out of which the copies' weights are gathered; and room for vectors of images."""
    grpo, lora = sketch.config.grpo, sketch.config.lora.rank > 0
    numbers = sum(math.prod(weight.shape) for weight in sketch.weights if weight.trained != lora)
    weights = numbers * jnp.dtype(sketch.execution.dtype).itemsize / grpo.tensor
    vectors = sketch.images.sampled_bytes(sketch.config.train.seq_len) if sketch.images else 0
    return max(0.0, weights + grpo.kv_cache_gib * 2**30 + vectors + lora * rests.frozen - temporaries)
