"""Lightning attention, which MiniMax-01 and M1 have in seven of eight layers (https://arxiv.org/abs/2501.08313, section
2.2): linear attention that takes nothing back, as Mamba 2 (layers/mamba.py), and whose states decay by a constant of
each head and layer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from shardlm.flops import memory_width
from shardlm.layers.delta_net import DeltaNet, DeltaNetConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal
from shardlm.ops.gated_delta import SKIP


@dataclasses.dataclass(frozen=True)
class LightningConfig(DeltaNetConfig):
    """The sizes are those of linear attention, with as many heads of queries and keys as of values. There are no
    convolutions: what stands for one sees two tokens, of the one before nothing. `decay` is the factor on the rates
    2 ** (-8 i / num_heads) of heads i from 1 on, by which the logarithms of states fall with each token."""

    decay: float = 1.0

    takes_back = False

    @classmethod
    def of(cls, num_heads: int, head_dim: int, decay: float) -> "LightningConfig":
        return cls(num_heads, num_heads, head_dim, head_dim, 2, decay=decay)

    @property
    def rates(self) -> np.ndarray:
        """float32 [N]."""
        heads = np.arange(1, self.num_heads + 1)
        return (2.0 ** (-8.0 * heads / self.num_heads) * self.decay).astype(np.float32)

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        return 5 * embed_dim * self.num_heads * self.head_dim

    def macs_per_token(self) -> int:
        """Of the states (flops.py)."""
        return memory_width(self.num_heads, self.head_dim, self.value_dim, takes_back=False)


class Lightning(DeltaNet):
    """x [B, T, D] -> [B, T, D]; weights "wq", "wk", "wv" and the output's gate "wg" (D, N, H), "wo" (N, H, D), and
    "out_scale" (N, H) of a norm of all outputs together."""

    def __init__(self, config: LightningConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, H = embed_dim, config.num_heads, config.head_dim
        self.config, self.kept_groups = config, N
        for name in ("wq", "wk", "wv", "wg"):
            params.projection(self, name, (D, N, H), ("embed", "heads", "head_dim"), normal(D**-0.5))
        out_init = normal(out_scale * (N * H) ** -0.5)
        params.projection(self, "wo", (N, H, D), ("heads", "head_dim", "embed"), out_init, into=2)
        self.out_scale = params((N, H), ("heads", "head_dim"), constant(1.0))

    def _convolutions(self, execution: Execution) -> dict[str, jax.Array]:
        """That leave every token as it is."""
        act, own = execution.rules.act, self.config
        taps = jnp.zeros((own.num_heads, own.head_dim, own.conv_width), execution.dtype).at[..., -1].set(1)
        split = {"q": "kv_heads", "k": "kv_heads", "v": "heads"}
        found = {name: jax.reshard(taps, act.spec(of, "head_dim", None)) for name, of in split.items()}
        return found | {SKIP: jax.reshard(jnp.zeros(own.num_heads, jnp.float32), act.spec("heads"))}

    def _rates(self, x: jax.Array, part: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        del part
        shape, of_heads = (*x.shape[:2], self.config.num_heads), execution.rules.act.spec("batch", "whole_seq", "heads")
        both = (-jnp.asarray(self.config.rates), jnp.ones(shape[-1:], jnp.float32))
        return tuple(jnp.broadcast_to(a, shape, out_sharding=of_heads) for a in both)

    def _gated(self, out: jax.Array, gate: jax.Array, execution: Execution) -> jax.Array:
        """Outputs [B, T, N, H] behind their norm and gate."""
        wide = out.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=(-2, -1), keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean + self.config.norm.eps)).astype(out.dtype)
        return normed * in_use(self.out_scale, execution) * jax.nn.sigmoid(gate)
