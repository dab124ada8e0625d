"""An objective's loss, gradients and evaluation of one batch, on the mesh of its run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from small import on_devices

from shardlm.train.program import Program
from shardlm.train.step import StepConfig, gradients, make_eval_step


def loss_and_gradients(program: Program, params: Any, frozen: Any, batch, evaluates: bool = False):
    """(gradients, metrics, and what an evaluation sums up)."""
    step = StepConfig(program.config.train.accumulation, objective=program.objective)

    def run(params, frozen, batch):
        found = gradients(program.model.bound(frozen), params, batch, jnp.float32(1), step)
        evaluation = make_eval_step(program.model, program.objective)(params, frozen, batch) if evaluates else {}
        return *found, evaluation

    with jax.set_mesh(program.mesh):
        return jax.tree.map(np.asarray, jax.jit(run)(params, frozen, on_devices(batch, program.model)))
