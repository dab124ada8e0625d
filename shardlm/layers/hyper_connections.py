"""Several streams in place of one, mixed around every layer (manifold-constrained hyper-connections,
https://arxiv.org/abs/2512.24880; DeepSeek V4): a layer reads a sum of the streams, and what it makes is added to all of
them after they are mixed by a matrix whose rows and columns sum to 1. All weights of the sums are made of the streams
themselves, token by token, in float32. Without the matrix streams stay as they are but for what is added (independent
hyper-connections, Hy4).

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
    iterations  of the projection to matrices whose rows and columns sum to 1 (Sinkhorn and Knopp); 0: streams are not
                mixed
    eps         beside the sums that are divided by, and added to the weights of what a layer reads
    norm_eps    of the norm over all streams, which has no scale
    magnitude   of the weights of what a layer makes, which are up to so much; without mixing `eps` is added to them too
    plain_head  behind the last block their mean is taken, for which there are no weights (GLM-5 Next)
    """

    count: int
    iterations: int
    eps: float
    norm_eps: float
    magnitude: float = 2.0
    plain_head: bool = False

    def __post_init__(self):
        if self.count < 1 or self.iterations < 0:
            raise ShardlmError(f"{self.count} streams and {self.iterations} iterations: at least 1 and 0")


class HyperConnection(nnx.Module):
    """Around a layer; weights "fn" (S * D, (2 + S) * S), "base" ((2 + S) * S,) and "scale" (3,), of what is summed
    before it, of what it makes, and of the mixing; without that "fn" (S * D, 2 * S), "base" (2 * S,), "scale" (2,)."""

    def __init__(self, config: StreamsConfig, embed_dim: int, params: Params):
        S = config.count
        self.config = config
        made = (2 + S) * S if config.iterations else 2 * S
        self.fn = params((S * embed_dim, made), ("embed", "norm"), normal((S * embed_dim) ** -0.5))
        self.base = params((made,), ("norm",), constant(0.0))
        self.scale = params((3 if config.iterations else 2,), ("norm",), constant(1.0))

    def before(self, x: jax.Array, execution: Execution) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """x [B, T, S * D] -> (what the layer reads [B, T, D]; for `after`: the weights of what it makes float32 [B, T,
        S] and, where streams are mixed, the matrix float32 [B, T, S, S])."""
        S, config = self.config.count, self.config
        made = _products(x, self, "fn", config.norm_eps, execution)
        scale, base = gathered(self, "scale", execution), gathered(self, "base", execution)
        before, after, *mix = (
            part * scale[i] + bias
            for i, (part, bias) in enumerate(
                zip(*(jnp.split(a, [S, 2 * S], axis=-1) for a in (made, base)), strict=True)
            )
        )
        after = config.magnitude * jax.nn.sigmoid(after)
        if not config.iterations:
            return _summed(x, jax.nn.sigmoid(before) + config.eps), (after + config.eps,)
        mix = mix[0].reshape(*after.shape[:2], S, S)
        spec = jax.typeof(mix).sharding.spec
        made = functools.partial(sums_of_one, iterations=config.iterations, eps=config.eps)
        mix = shard_map(made, in_specs=spec, out_specs=spec)(mix)
        return _summed(x, jax.nn.sigmoid(before) + config.eps), (after, mix)

    def after(self, x: jax.Array, made: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        """The streams x [B, T, S * D] mixed, and what the layer made [B, T, D] added to each."""
        if len(weights) == 1:
            added = weights[0][..., None] * made[:, :, None].astype(jnp.float32)
            return (x.astype(jnp.float32) + added.reshape(x.shape)).astype(x.dtype)
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


def mean_of(x: jax.Array, config: StreamsConfig) -> jax.Array:
    """The streams x [B, T, S * D] as one, [B, T, D]."""
    streams = x.reshape(*x.shape[:2], config.count, -1)
    return jnp.mean(streams.astype(jnp.float32), axis=2).astype(x.dtype)


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
