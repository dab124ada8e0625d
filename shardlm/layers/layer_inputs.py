"""What each layer takes of each token besides the stream (per-layer embeddings, Gemma 3n and 4): a row of a table for
each token and layer, and a projection of the token's embedding."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from shardlm.errors import ShardlmError
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal, project
from shardlm.ops.swiglu import Activation, activate


@dataclasses.dataclass(frozen=True)
class LayerInputsConfig:
    """dim    numbers of each layer and token
    activation  of the gate, that a layer makes of the stream, on them
    vocab_size  rows of the table
    fewer   there are more tokens, which stand for what is not text: they have the first row, and do not train it
    """

    dim: int
    activation: Activation
    vocab_size: int
    fewer: bool = False

    def __post_init__(self):
        if min(self.dim, self.vocab_size) < 1:
            raise ShardlmError(f"dim={self.dim}, vocab_size={self.vocab_size} of layers' inputs: at least 1 each")


class LayerInputs(nnx.Module):
    """tokens [B, T] and their embeddings [B, T, D] -> [L, B, T, P]; weights "table" (V, L, P), "from_embedding" (D, L,
    P) and "norm"."""

    def __init__(self, config: LayerInputsConfig, layers: int, embed_dim: int, norm: NormConfig, params: Params):
        V, L, P, D = config.vocab_size, layers, config.dim, embed_dim
        self.config, self.embed_dim = config, embed_dim
        self.table = params((V, L, P), ("vocab", "layers", "embed"), normal(P**-0.5))
        params.weight(self, "from_embedding", (D, L, P), ("embed", "layers", "head_dim"), normal(1.0))
        self.norm = Norm(norm, P, params)

    def __call__(self, tokens: jax.Array, x: jax.Array, execution: Execution) -> jax.Array:
        """tokens int32 [B, T], x [B, T, D] with the sequence split as between blocks; returns it split so too."""
        act, P = execution.rules.act, self.config.dim
        looked_up = act.spec("batch", "whole_seq", None, "embed")
        own = self._looked_up(tokens, in_use(self.table, execution), looked_up)
        own = jax.reshard(own, act.spec("batch", "seq", None, "embed")) * jnp.asarray(P**0.5, own.dtype)
        made = project("btd,dlp->btlp", x, self, "from_embedding", execution.plain)
        made = self.norm(made * jnp.asarray(self.embed_dim**-0.5, made.dtype), execution)
        return jnp.moveaxis((made + own) * jnp.asarray(2**-0.5, made.dtype), 2, 0)

    def _looked_up(self, tokens: jax.Array, table: jax.Array, spec: PartitionSpec) -> jax.Array:
        if not self.config.fewer:
            return table.at[tokens].get(out_sharding=spec)
        there = tokens < self.config.vocab_size
        own = table.at[jnp.where(there, tokens, 0)].get(out_sharding=spec)
        there = jax.reshard(there, PartitionSpec(*spec[:2]))[..., None, None]
        return jnp.where(there, own, jax.lax.stop_gradient(own))


class LayerInput(nnx.Module):
    """What a layer makes of its input: x [B, T, D] -> norm((act(x @ gate) * input) @ up), [B, T, D]; weights "gate" (D,
    P), "up" (P, D) and "norm"."""

    def __init__(self, config: LayerInputsConfig, embed_dim: int, norm: NormConfig, params: Params):
        D, P = embed_dim, config.dim
        self.config = config
        params.weight(self, "gate", (D, P), ("embed", "head_dim"), normal(D**-0.5))
        params.weight(self, "up", (P, D), ("head_dim", "embed"), normal(P**-0.5))
        self.norm = Norm(norm, D, params)

    def __call__(self, x: jax.Array, own: jax.Array, execution: Execution) -> jax.Array:
        """x [B, T, D] and the layer's own of the inputs [B, T, P], the sequence split as between blocks."""
        plain = execution.plain  # narrow
        gate = activate(project("btd,dp->btp", x, self, "gate", plain), self.config.activation)
        return self.norm(project("btp,pd->btd", gate * own, self, "up", plain), execution)
