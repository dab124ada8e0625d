"""The gated feed-forward layer."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.param import Execution, Params, in_use, normal
from shardlm.ops.swiglu import swiglu


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    mlp_dim: int

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the three projections, each used once for a token."""
        return 3 * embed_dim * self.mlp_dim


class Mlp(nnx.Module):
    """silu(x @ gate) * (x @ up) @ down; weights "gate" and "up" (D, F), "down" (F, D)."""

    def __init__(self, config: MlpConfig, embed_dim: int, out_scale: float, params: Params):
        D, F = embed_dim, config.mlp_dim
        self.gate = params((D, F), ("embed", "mlp"), normal(D**-0.5))
        self.up = params((D, F), ("embed", "mlp"), normal(D**-0.5))
        self.down = params((F, D), ("mlp", "embed"), normal(out_scale * F**-0.5))

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        """x [B, T, D], the sequence split as between blocks; returns x's shape and split."""
        act = execution.rules.act
        x = jax.reshard(x, act.spec("batch", "whole_seq", "embed"))
        gate = jnp.einsum("btd,df->btf", x, in_use(self.gate, execution))
        up = jnp.einsum("btd,df->btf", x, in_use(self.up, execution))
        down = in_use(self.down, execution)
        return jnp.einsum("btf,fd->btd", swiglu(gate, up), down, out_sharding=act.spec("batch", "seq", "embed"))
