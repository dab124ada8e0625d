"""Numeric precision of a training run: what is computed in which type, and dynamic loss scaling for float16."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

Precision = Literal["fp32", "bf16", "fp16"]
"""Type of activations and of weights in use; master weights, norms, softmax and loss are float32, and the optimizer's
state unless optim.moments says otherwise.

fp32  everything in float32
bf16  matmuls in bfloat16; float32's range, so no scaling
fp16  matmuls in float16 with a dynamic loss scale (https://arxiv.org/abs/1710.03740, section 3.2)
"""

COMPUTE_DTYPE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
FIRST_SCALE = 2.0**15
GROWTH_INTERVAL = 1000  # steps without an overflow before the scale doubles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor on the loss, float32 scalar, and the number of steps since it changed, int32 scalar."""

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def start(cls) -> "LossScale":
        return cls(jnp.float32(FIRST_SCALE), jnp.int32(0))

    def update(self, finite: jax.Array) -> "LossScale":
        """Halved after an overflow (not below 1), doubled after GROWTH_INTERVAL good steps (not above 2**24)."""
        good = jnp.where(finite, self.good_steps + 1, 0)
        grown = good >= GROWTH_INTERVAL
        scale = jnp.where(finite, jnp.where(grown, self.scale * 2, self.scale), self.scale / 2)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(grown, 0, good))
