"""The feed-forward layer."""

import dataclasses
import math
import statistics

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.context import Context
from shardlm.layers.fused import Late, over, project_back, project_gated, taken
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.ops.swiglu import Activation, activate, gated, xielu

# Where the parameters of xielu start, as those of transformers: softplus of the first is 0.8, of the second 0.3.
XIELU = {"rise": math.log(math.expm1(0.8)), "bend": math.log(math.expm1(0.3)), "slope": 0.5, "top": -1e-6}
TRAINED = ("rise", "bend")


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    """Gated, as SwiGLU and GEGLU are (https://arxiv.org/abs/2002.05202), or plain as in GPT-2; "xielu", which has
    parameters of its own, is plain. `limit` is of both factors of a gated one (ops/swiglu.py); 0: none. gate_scale and
    out_scale are multiplied with what the gate reads and with the output (Falcon H1). `sparsity` is the share of
    what the gate reads that is cut to 0, were it normally distributed (Gemma 3n); 0: nothing is."""

    mlp_dim: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    limit: float = 0.0
    gate_scale: float = 1.0
    out_scale: float = 1.0
    sparsity: float = 0.0

    num_experts = 0
    there = True

    def __post_init__(self):
        if self.mlp_dim < 1:
            raise ShardlmError(f"mlp_dim={self.mlp_dim}: it must be at least 1")
        if not 0 <= self.sparsity < 1:
            raise ShardlmError(f"sparsity={self.sparsity}: it must be at least 0 and below 1")
        if self.activation == "xielu" and self.gated:
            raise ShardlmError("activation='xielu' is of feed-forward layers without a gate; set gated=False")

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the hidden layers, each split over the tensor axis."""
        return (self.mlp_dim,)

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        return (3 if self.gated else 2) * embed_dim * self.mlp_dim


@dataclasses.dataclass(frozen=True)
class NoMlpConfig:
    """Of blocks that have none (some of Nemotron-H's)."""

    num_experts = 0
    there = False
    widths = ()

    def parameters_per_token(self, embed_dim: int) -> int:
        """None."""
        return 0 * embed_dim


class Mlp(nnx.Module):
    """act(x @ gate) * (x @ up) @ down, or act(x @ up) @ down; weights "gate" and "up" (D, F), "down" (F, D), and with
    biases "gate_bias" and "up_bias" (F,), "down_bias" (D,); of xielu (ops/swiglu.py) "rise" and "bend" (1,), and the
    numbers "slope" and "top", which are not trained."""

    takes_late = True  # the norm of x (fused.py)

    def __init__(self, config: MlpConfig, embed_dim: int, out_scale: float, params: Params):
        D, F = embed_dim, config.mlp_dim
        self.config = config
        for name in ("gate", "up") if config.gated else ("up",):
            params.projection(self, name, (D, F), ("embed", "mlp"), normal(D**-0.5))
            if config.bias:
                setattr(self, f"{name}_bias", params((F,), ("mlp",), constant(0.0)))
        params.projection(self, "down", (F, D), ("mlp", "embed"), normal(out_scale * F**-0.5))
        if config.bias:
            self.down_bias = params((D,), ("norm",), constant(0.0))
        if config.activation == "xielu":
            for name, start in XIELU.items():
                setattr(
                    self, name, params((1,) if name in TRAINED else (), ("norm",) * (name in TRAINED), constant(start))
                )

    def __call__(
        self, x: jax.Array | Late, ctx: Context, execution: Execution, stream: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """x [B, T, D], the sequence split as between blocks; returns (x's shape and split; no auxiliary
        values)."""
        del ctx, stream
        act = execution.rules.act
        x = over(x, act.spec("batch", "whole_seq", "embed"))
        hidden = self._hidden(x, execution)
        out = project_back("btf,fd->btd", hidden, self, "down", execution)
        out = out + in_use(self.down_bias, execution) if self.config.bias else out
        return out if self.config.out_scale == 1 else out * self.config.out_scale, {}

    def _hidden(self, x: jax.Array | Late, execution: Execution) -> jax.Array:
        """[B, T, F]."""
        plain = self.config.gated and not self.config.bias and not self.config.limit and self.config.gate_scale == 1
        plain = plain and not self.config.sparsity
        if plain and (made := project_gated(x, self, self.config.activation, execution)) is not None:
            return made
        x = taken(x)
        up = self._into(x, "up", execution)
        if self.config.gated:
            gate = self._into(x, "gate", execution)
            gate = gate if self.config.gate_scale == 1 else gate * self.config.gate_scale
            gate = cut_to_share(gate, self.config.sparsity) if self.config.sparsity else gate
            return gated(gate, up, self.config.activation, self.config.limit)
        if self.config.activation == "xielu":
            own = {name: in_use(getattr(self, name), execution) for name in XIELU}
            return xielu(up, **{name: a if name in TRAINED else jax.lax.stop_gradient(a) for name, a in own.items()})
        return activate(up, self.config.activation)

    def _into(self, x: jax.Array, name: str, execution: Execution) -> jax.Array:
        hidden = project("btd,df->btf", x, self, name, execution)
        return hidden + in_use(getattr(self, f"{name}_bias"), execution) if self.config.bias else hidden


def cut_to_share(gate: jax.Array, sparsity: float) -> jax.Array:
    """gate [B, T, F] less what a share of them is below, were they normally distributed, and at least 0."""
    above = statistics.NormalDist().inv_cdf(sparsity)
    mean = jnp.mean(gate, axis=-1, keepdims=True)
    spread = jnp.sqrt(jnp.mean(jnp.square(gate - mean), axis=-1, keepdims=True))
    return jax.nn.relu(gate - (mean + spread * jnp.asarray(above, gate.dtype)))
