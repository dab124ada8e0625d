"""Several streams in place of one, whose sums are gated number by number (Qwen4-Exp's gated residual): a layer reads
the mean of all streams after a norm of each, each number times a gate that a narrow layer makes of all streams; and
what it makes is added to every stream by a weight of its own. Streams are not mixed with each other otherwise
(layers/hyper_connections.py has those that are).

Between blocks the streams of a token lie side by side, [B, T, S * D]."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.param import Execution, Params, constant, gathered, normal, project


@dataclasses.dataclass(frozen=True)
class GatedStreamsConfig:
    """count     of streams, S in shapes
    rank      width of the layer that makes gates
    norm_eps  of the norm of each stream, whose scales are stored as their distance from 1
    """

    count: int
    rank: int
    norm_eps: float

    def __post_init__(self):
        if self.count < 2 or self.rank < 1:
            raise ShardlmError(f"{self.count} streams, gates through {self.rank} numbers: at least 2 and 1")

    def parameters_per_token(self, embed_dim: int, adds: bool = True) -> int:
        """Of one layer's; without `adds` of that which reads the streams behind the last block."""
        return self.count * embed_dim * (2 * self.rank + adds * self.count)


class GatedStreamsHead(nnx.Module):
    """x [B, T, S * D] -> [B, T, D]; weights "scale" (S * D,), "down" (S, D, R) and "up" (R, S, D)."""

    def __init__(self, config: GatedStreamsConfig, embed_dim: int, params: Params):
        S, D, R = config.count, embed_dim, config.rank
        self.config = config
        params = dataclasses.replace(params, lora=LoraConfig())
        self.scale = params((S * D,), ("norm",), constant(0.0))
        params.weight(self, "down", (S, D, R), ("groups", "embed", "latent_whole"), normal((S * D) ** -0.5), into=2)
        params.weight(self, "up", (R, S, D), ("latent_whole", "groups", "embed"), normal(R**-0.5))

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        return self.read(x, execution)[0]

    def read(self, x: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """(what a layer reads [B, T, D], the streams after their norms [B, T, S, D])."""
        plain = execution.plain
        x = x.reshape(*x.shape[:2], self.config.count, -1)
        normed = grouped_norm(x, gathered(self, "scale", execution), self.config.norm_eps)
        narrow = project("btsd,sdr->btr", normed, self, "down", plain) / self.config.count
        gates = jax.nn.sigmoid(project("btr,rsd->btsd", jax.nn.silu(narrow), self, "up", plain))
        return jnp.mean(gates * normed, axis=2), normed


class GatedStreams(GatedStreamsHead):
    """Around a layer; also weight "add" (S, D, S), of what makes the weights by which streams take what it makes."""

    def __init__(self, config: GatedStreamsConfig, embed_dim: int, params: Params):
        super().__init__(config, embed_dim, params)
        S, D = config.count, embed_dim
        names = ("groups", "embed", "norm")
        dataclasses.replace(params, lora=LoraConfig()).weight(
            self, "add", (S, D, S), names, normal((S * D) ** -0.5), into=2
        )

    def before(self, x: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """x [B, T, S * D] -> (what the layer reads [B, T, D]; for `after`, the weights [B, T, S])."""
        plain = execution.plain
        read, normed = self.read(x, execution)
        added = project("btsd,sdj->btj", normed, self, "add", plain) / self.config.count
        return read, 2 * jax.nn.sigmoid(added)

    def after(self, x: jax.Array, made: jax.Array, weights: jax.Array) -> jax.Array:
        """The streams x [B, T, S * D] with what the layer made [B, T, D] added to each by its weight."""
        added = weights[..., None] * made[:, :, None]
        return x + added.reshape(*x.shape)


def grouped_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x [..., S, D] with the mean square of each D made 1, times 1 + scale [S * D], in float32; x's shape and dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (x32 * (1 + scale.astype(jnp.float32)).reshape(x.shape[-2:])).astype(x.dtype)
