"""What a head that drafts by the streams of the decoder it drafts for has beside the layers of a decoder (EAGLE-3,
https://arxiv.org/abs/2503.01840). Its first layer reads an embedding beside that (AttentionConfig.beside); how it
drafts is serve/speculation/eagle.py's."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, gathered, normal, project

NEVER = -1e30  # logit of a token that is not proposed: finite, so that no mask leaves nothing


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """reads      numbers of each token that it is made of: streams between layers of the other decoder, side by side
    vocab_size  of the tokens that it proposes, which are some of the other's, or all
    normed      what it reads has a norm first (vllm-project/speculators, norm_before_fc)
    goes_on     what of its own stream further drafts read: as it is, or after its last norm (EAGLE 3.1, norm_output)
    """

    reads: int
    vocab_size: int
    normed: bool = False
    goes_on: Literal["stream", "normed"] = "stream"


class Eagle(nnx.Module):
    """Weights "fc" (R, D), and where not all tokens are proposed "proposed" int32 (V,), the place of each among the
    logits, -1: it is not; norm "fc_norm" where there is one."""

    def __init__(self, config: EagleConfig, embed_dim: int, vocab_size: int, norm: NormConfig, params: Params):
        R, self.config = config.reads, config
        params.projection(self, "fc", (R, embed_dim), ("embed", "norm"), normal(R**-0.5))
        if config.normed:
            self.fc_norm = Norm(norm, R, params)
        if config.vocab_size < vocab_size:
            self.proposed = params((vocab_size,), ("norm",), functools.partial(_first, config.vocab_size))

    def __call__(self, streams: jax.Array, execution: Execution) -> jax.Array:
        """Streams of the other decoder [B, T, R] -> what the first layer takes [B, T, D]."""
        streams = self.fc_norm(streams, execution) if self.config.normed else streams
        return project("btr,rd->btd", streams, self, "fc", execution)

    def of_all(self, logits: jax.Array, execution: Execution) -> jax.Array:
        """Logits float32 [B, C] of the tokens that it proposes, whole on every device -> [B, V] of all."""
        if not hasattr(self, "proposed"):
            return logits
        place = gathered(self, "proposed", execution)
        return jnp.where(place < 0, NEVER, jnp.take(logits, jnp.maximum(place, 0), axis=-1))


def _first(count: int, key, shape, spec) -> jax.Array:
    """The first ones, before a file says which."""
    place = jnp.arange(shape[0], dtype=jnp.int32, out_sharding=spec)
    return jnp.where(place < count, place, -1)
