"""The step of a run that trains its encoder of images too, in two programs: the gradients of the language model and of
the vectors that stand in its rows, and the update of both by one norm. Between them the images are read once more, on
the way back to the encoder's weights (learned_encoder.py)."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import optax

from shardlm.layers.seen import VECTORS
from shardlm.optim import ENCODER
from shardlm.state import TrainState, at_rest
from shardlm.train import offload
from shardlm.train.learned_encoder import added, sums_of
from shardlm.train.looks import Look
from shardlm.train.step import Batch, StepConfig, accumulated_with, make_update, scale_of
from shardlm.train.strategy import Part, Strategy

if TYPE_CHECKING:
    from shardlm.train.program import Program

SHOWN = "shown"  # of a batch: its images, as Shown
COUNTED = ("segment_ids", "positions")  # what an update counts (step.counts)


@dataclasses.dataclass(frozen=True)
class Shown:
    """The images of a batch. `still`: the weights of the encoder that no step changes."""

    looks: tuple[Look, ...]
    still: Any


def learning(program: "Program", rate: optax.Schedule, config: StepConfig) -> Strategy:
    """The strategy of a program whose encoder is trained."""
    seeing = program.seeing
    update = make_update(program.trained, program.tx, rate, config)

    def gradients(state: TrainState, batch: Batch):
        own = {VECTORS: batch[VECTORS]}
        rest = {name: a for name, a in batch.items() if name != VECTORS}
        run = functools.partial(_gradients, program.model.bound(state.frozen), config)
        text = {name: a for name, a in state.params.items() if name != ENCODER}
        grads, losses, of_own = offload.with_copy(run, program.model.execution.dtype)(text, rest, own, scale_of(state))
        return {"grads": grads, "losses": losses, VECTORS: of_own[VECTORS]}

    def updated(state: TrainState, batch: Batch, found: dict[str, Any], sums: Any):
        scale = scale_of(state)
        of_encoder = jax.tree.map(lambda g: g / scale, added(seeing.learned, sums, seeing.by_device))
        return update(state, batch, {**found["grads"], ENCODER: of_encoder}, found["losses"], None)

    def between() -> tuple:
        with jax.set_mesh(program.mesh), program.tracing():
            batch = program.batch_shapes()
            found = jax.eval_shape(gradients, program.state_shapes(), batch)
        del found[VECTORS]
        found = jax.tree.map(lambda s: at_rest(s, program.mesh), found)
        return {name: batch[name] for name in COUNTED}, found, sums_of(seeing.learned, seeing.by_device)

    def assemble(compiled):
        def step(number: int, state: TrainState, batch: dict[str, Any]):
            shown, arrays = batch[SHOWN], {name: a for name, a in batch.items() if name != SHOWN}
            found = done(compiled["step"](state, done(arrays)))
            with program.tracing():
                eyes = done(seeing.eyes(state.params, shown.still))
                sums = done(seeing.gradients(eyes, shown.looks, found.pop(VECTORS)))
            return done(compiled["update"](state, {name: arrays[name] for name in COUNTED}, found, sums))

        return step

    def done(tree: Any) -> Any:
        """On CPUs one program after the other: two devices, for which XLA has two threads, stood still within 25 steps
        where one was in a collective of the next program before the other was done with this one."""
        return jax.block_until_ready(tree) if program.mesh.devices.flat[0].platform == "cpu" else tree

    programs = {"step": Part(gradients, changes=False), "update": Part(updated, beside=between)}
    return Strategy(lambda state: state, programs, assemble)


def _gradients(model, config: StepConfig, params: Any, batch: Batch, own: Batch, scale: jax.Array):
    """(gradients where the optimizer rests, losses, gradients of `own` times `scale`)."""
    weights = config.objective.weights(batch, scale)
    used = config.objective.used(batch, config.accumulation)
    grads, of_own, parts = accumulated_with(own, model, params, batch, weights, config, used)
    losses = config.objective.metrics(jax.tree.map(lambda a: a / scale, parts))
    grads = model.place(grads, model.execution.rules.optimizer)
    return jax.tree.map(lambda g: g / scale, grads), losses, of_own
