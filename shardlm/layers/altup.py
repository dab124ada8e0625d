"""Several streams in place of one, of which a layer reads one and the others are predicted (alternating updates, AltUp,
https://arxiv.org/abs/2301.13310; Gemma 3n): before a layer each stream is predicted from all of them, and after it each
is corrected by what the layer made beyond the prediction of its own. Beside attention there is a second residual of low
rank (LAuReL, https://arxiv.org/abs/2411.07501).

Between blocks the streams of a token lie side by side, [B, T, S * D]."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project

LEAST = 1e-5  # mean square that a stream made of the embedding is divided by the root of, at least


@dataclasses.dataclass(frozen=True)
class AltUpConfig:
    """count   of streams, S in shapes
    active  the stream that layers read
    clip    the weights of predictions and corrections are from -clip to clip, here in every pass; `transformers` holds
            them so in training alone. 0: whatever they are
    scaled  the active stream is multiplied by a learned scale where a layer's own inputs are gated by it
    rank    of LAuReL
    norm    of what the weights are made of
    """

    count: int
    active: int
    clip: float
    scaled: bool
    rank: int
    norm: NormConfig

    def __post_init__(self):
        if self.count < 2 or not 0 <= self.active < self.count or self.rank < 1:
            raise ShardlmError(
                f"{self.count} streams, of which layers read number {self.active}, and rank={self.rank}: at least 2, "
                "one of them, and 1"
            )

    def parameters_per_token(self, embed_dim: int) -> int:
        """Of one layer: the router, which is used twice, and LAuReL."""
        return 2 * embed_dim * (self.count + self.rank)


class AltUp(nnx.Module):
    """Around a layer; weights "router" (D, S), "router_norm" of D, "predict" (S, S, S) as (weight of the router, stream
    that is made, stream it is made of), "correct" (S, S) as (weight of the router, stream), "scale" (D,)."""

    def __init__(self, config: AltUpConfig, embed_dim: int, params: Params):
        S, D = config.count, embed_dim
        self.config = config
        self.router_norm = Norm(config.norm, D, params)
        params.weight(self, "router", (D, S), ("embed", "norm"), normal(D**-0.5))
        self.predict = params((S, S, S), ("norm",) * 3, normal(0.02))
        self.correct = params((S, S), ("norm",) * 2, normal(0.02))
        self.scale = params((D,), ("norm",), constant(0.0))

    def before(self, x: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
        """The streams x [B, T, S * D] -> (what the layer reads [B, T, D]; for `after`, the predictions [B, T, S,
        D])."""
        x = x.reshape(*x.shape[:2], self.config.count, -1)
        weights = jnp.einsum(
            "btp,pca->btca", self._routed(x[:, :, self.config.active], execution), self._cut("predict", execution)
        )
        predicted = x + jnp.einsum("btca,btad->btcd", weights, x)
        return predicted[:, :, self.config.active], predicted

    def after(self, predicted: jax.Array, made: jax.Array, execution: Execution) -> jax.Array:
        """The predictions [B, T, S, D] corrected by what the layer made [B, T, D], its residual included."""
        weights = 1 + jnp.einsum("btp,pc->btc", self._routed(made, execution), self._cut("correct", execution))
        return predicted + weights[..., None] * (made - predicted[:, :, self.config.active])[:, :, None]

    def gate_of(self, corrected: jax.Array, execution: Execution) -> jax.Array:
        """What gates a layer's own inputs, of the streams [B, T, S, D]: [B, T, D]."""
        active = corrected[:, :, self.config.active]
        return active * in_use(self.scale, execution) if self.config.scaled else active

    def with_inputs(self, corrected: jax.Array, made: jax.Array) -> jax.Array:
        """The streams [B, T, S, D], all but the first with what is made of a layer's own inputs [B, T, D] added, side
        by side."""
        first = jnp.arange(self.config.count)[:, None] == 0
        x = corrected + jnp.where(first, jnp.zeros((), made.dtype), made[:, :, None])
        return x.reshape(*x.shape[:2], -1)

    def _routed(self, x: jax.Array, execution: Execution) -> jax.Array:
        """x [B, T, D] -> [B, T, S]."""
        plain = execution.plain
        reads = self.router_norm(x, execution) * jnp.asarray(1 / x.shape[-1], x.dtype)
        return jnp.tanh(project("btd,ds->bts", reads, self, "router", plain).astype(jnp.float32)).astype(x.dtype)

    def _cut(self, name: str, execution: Execution) -> jax.Array:
        weight, clip = in_use(getattr(self, name), execution), self.config.clip
        return jnp.clip(weight, -clip, clip) if clip else weight


class Laurel(nnx.Module):
    """x + norm((x @ down) @ up), x [B, T, D]; weights "down" (D, R), "up" (R, D) and "norm" of D."""

    def __init__(self, config: AltUpConfig, embed_dim: int, params: Params):
        D, R = embed_dim, config.rank
        params.weight(self, "down", (D, R), ("embed", "latent_whole"), normal(D**-0.5))
        params.weight(self, "up", (R, D), ("latent_whole", "embed"), normal(R**-0.5))
        self.norm = Norm(config.norm, D, params)

    def __call__(self, x: jax.Array, execution: Execution) -> jax.Array:
        plain = execution.plain
        narrow = project("btd,dr->btr", x, self, "down", plain)
        return x + self.norm(project("btr,rd->btd", narrow, self, "up", plain), execution)


class AltUpEnds(nnx.Module):
    """The embedding as several streams, and the streams behind the last block as one; weights "into" and "out" (S - 1,
    D, D), of all streams but the first."""

    def __init__(self, config: AltUpConfig, embed_dim: int, params: Params):
        S, D = config.count, embed_dim
        self.config = config
        for name in ("into", "out"):
            params.weight(self, name, (S - 1, D, D), ("groups", "embed", "norm"), normal(D**-0.5))

    def begin(self, x: jax.Array, execution: Execution) -> jax.Array:
        """x [B, T, D] -> [B, T, S * D]."""
        plain = execution.plain
        made = _as_large(project("btd,sde->btse", x, self, "into", plain), x)
        return jnp.concatenate([x[:, :, None], made], axis=2).reshape(*x.shape[:2], -1)

    def end(self, x: jax.Array, execution: Execution) -> jax.Array:
        """x [B, T, S * D] -> [B, T, D]."""
        plain = execution.plain
        x = x.reshape(*x.shape[:2], self.config.count, -1)
        first = x[:, :, 0]
        made = _as_large(project("btsd,sde->btse", x[:, :, 1:], self, "out", plain), first)
        return (first + jnp.sum(made, axis=2)) / self.config.count


def _as_large(made: jax.Array, x: jax.Array) -> jax.Array:
    """Streams [B, T, S, D], each with the root mean square of x [B, T, D]."""
    wanted = jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))[:, :, None]
    own = jnp.sqrt(jnp.maximum(jnp.mean(jnp.square(made), axis=-1, keepdims=True), LEAST))
    return made * wanted / own
