"""The gated feed-forward layer."""

import dataclasses

import jax
from flax import nnx

from shardlm.layers.context import Context
from shardlm.layers.param import Execution, Params, normal, project
from shardlm.ops.swiglu import swiglu


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    mlp_dim: int

    num_experts = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the hidden layers, each split over the tensor axis."""
        return (self.mlp_dim,)

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

    def __call__(self, x: jax.Array, ctx: Context, execution: Execution) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, D], the sequence split as between blocks; returns (x's shape and split, no auxiliary values)."""
        del ctx
        act = execution.rules.act
        x = jax.reshard(x, act.spec("batch", "whole_seq", "embed"))
        hidden = swiglu(project("btd,df->btf", x, self.gate, execution), project("btd,df->btf", x, self.up, execution))
        return project("btf,fd->btd", hidden, self.down, execution, act.spec("batch", "seq", "embed")), {}
