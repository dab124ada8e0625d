"""Several streams in place of one, mixed around every layer (manifold-constrained hyper-connections,
https://arxiv.org/abs/2512.24880; DeepSeek V4): a layer reads a sum of the streams, and what it makes is added to all of
them after they are mixed by a matrix whose rows and columns sum to 1. All weights of the sums are made of the streams
themselves, token by token, in float32.

Between blocks the streams of a token lie side by side, [B, T, S * D]."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.param import Execution, Params, constant, gathered, normal
from shardlm.mesh import shard_map
from shardlm.ops.sums_of_one import sums_of_one


@dataclasses.dataclass(frozen=True)
class StreamsConfig:
    """count       of streams, S in shapes
    iterations  of the projection to matrices whose rows and columns sum to 1 (Sinkhorn and Knopp)
    eps         beside the sums that are divided by
    norm_eps    of the norm over all streams, which has no scale
    """

    count: int
    iterations: int
    eps: float
    norm_eps: float

    def __post_init__(self):
        if min(self.count, self.iterations) < 1:
            raise ShardlmError(f"{self.count} streams and {self.iterations} iterations: at least 1 each")


class HyperConnection(nnx.Module):
    """Around a layer; weights "fn" (S * D, (2 + S) * S), "base" ((2 + S) * S,) and "scale" (3,), of what is summed
    before it, of what it makes, and of the mixing."""

    def __init__(self, config: StreamsConfig, embed_dim: int, params: Params):
        S = config.count
        self.config = config
        self.fn = params((S * embed_dim, (2 + S) * S), ("embed", "norm"), normal((S * embed_dim) ** -0.5))
        self.base = params(((2 + S) * S,), ("norm",), constant(0.0))
        self.scale = params((3,), ("norm",), constant(1.0))

    def before(self, x: jax.Array, execution: Execution) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """x [B, T, S * D] -> (what the layer reads [B, T, D]; for `after`: the weights of what it makes float32 [B, T,
        S] and the matrix float32 [B, T, S, S])."""
        S, config = self.config.count, self.config
        made = _products(x, self, "fn", config.norm_eps, execution)
        scale, base = gathered(self, "scale", execution), gathered(self, "base", execution)
        before, after, mix = (
            part * scale[i] + bias
            for i, (part, bias) in enumerate(
                zip(*(jnp.split(a, [S, 2 * S], axis=-1) for a in (made, base)), strict=True)
            )
        )
        mix = mix.reshape(*mix.shape[:2], S, S)
        spec = jax.typeof(mix).sharding.spec
        made = functools.partial(sums_of_one, iterations=config.iterations, eps=config.eps)
        mix = shard_map(made, in_specs=spec, out_specs=spec)(mix)
        return _summed(x, jax.nn.sigmoid(before) + config.eps), (2 * jax.nn.sigmoid(after), mix)

    def after(self, x: jax.Array, made: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The streams x [B, T, S * D] mixed, and what the layer made [B, T, D] added to each."""
        each, mix = (a.astype(x.dtype) for a in weights)
        S, D = each.shape[-1], made.shape[-1]
        x = x.reshape(*x.shape[:2], S, D)
        mixed = jnp.einsum("btjk,btjd->btkd", mix, x) + each[..., None] * made[:, :, None]
        return mixed.reshape(*x.shape[:2], S * D)


class StreamsHead(nnx.Module):
    """The streams behind the last block as one; weights "fn" (S * D, S), "base" (S,) and "scale" (1,)."""

    def __init__(self, config: StreamsConfig, embed_dim: int, params: Params):
        S = config.count
        self.config = config
        self.fn = params((S * embed_dim, S), ("embed", "norm"), normal((S * embed_dim) ** -0.5))
        self.base = params((S,), ("norm",), constant(0.0))
        self.scale = params((1,), ("norm",), constant(1.0))

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        """x [B, T, S * D] -> [B, T, D]."""
        made = _products(x, self, "fn", self.config.norm_eps, execution)
        made = made * gathered(self, "scale", execution) + gathered(self, "base", execution)
        return _summed(x, jax.nn.sigmoid(made) + self.config.eps)


def _products(x: jax.Array, module: nnx.Module, name: str, eps: float, execution: Execution) -> jax.Array:
    """x [B, T, S * D], normed, times a weight: float32. A norm without a scale is a number of each token, by which the
    product is divided: the normed streams in float32 would be written and read, 64 KiB a token each of 4 x 4,096."""
    x32 = x.astype(jnp.float32)
    weight = gathered(module, name, execution).astype(jnp.float32)
    made = jnp.einsum("btd,dn->btn", x32, weight, precision="highest")
    return made * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)


def _summed(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The streams x [B, T, S * D] by weights float32 [B, T, S]: [B, T, D]."""
    streams = x.reshape(*x.shape[:2], weights.shape[-1], -1)
    return jnp.sum(weights[..., None] * streams.astype(jnp.float32), axis=2).astype(x.dtype)
