"""What a head that drafts by the streams of the decoder it drafts for has beside the layers of a decoder (EAGLE-3,
https://arxiv.org/abs/2503.01840). Its first layer reads an embedding beside that (AttentionConfig.beside); how it
drafts is serve/speculation/eagle.py's."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.norm import HeadNorms, Norm, NormConfig
from shardlm.layers.param import Execution, Params, gathered, normal, project

NEVER = -1e30  # logit of a token that is not proposed: finite, so that no mask leaves nothing


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """reads      numbers of each token that it is made of: streams between layers of the other decoder, side by side
    vocab_size  of the tokens that it proposes, which are some of the other's, or all
    normed      how many norms what it reads has first: one of it all (vllm-project/speculators, norm_before_fc), or
                one of each stream (EAGLE 3.1, fc_norm); 0: none
    goes_on     what of its own stream further drafts read: as it is, or after its last norm (EAGLE 3.1, norm_output)
    """

    reads: int
    vocab_size: int
    normed: int = 0
    goes_on: Literal["stream", "normed"] = "stream"


class Eagle(nnx.Module):
    """Weights "fc" (R, D), and where not all tokens are proposed "proposed" int32 (V,), the place of each among the
    logits, -1: it is not; norm "fc_norm", or "fc_norms" of each stream, where there are some."""

    def __init__(self, config: EagleConfig, embed_dim: int, vocab_size: int, norm: NormConfig, params: Params):
        R, self.config = config.reads, config
        params.projection(self, "fc", (R, embed_dim), ("embed", "norm"), normal(R**-0.5))
        if config.normed == 1:
            self.fc_norm = Norm(norm, R, params)
        elif config.normed:
            self.fc_norms = HeadNorms(norm, config.normed, R // config.normed, "norm", params)
        if config.vocab_size < vocab_size:
            self.proposed = params((vocab_size,), ("norm",), functools.partial(_first, config.vocab_size))

    def __call__(self, streams: jax.Array, execution: Execution) -> jax.Array:
        """Streams of the other decoder [B, T, R] -> what the first layer takes [B, T, D]."""
        if self.config.normed == 1:
            streams = self.fc_norm(streams, execution)
        elif self.config.normed:
            apart = streams.reshape(*streams.shape[:-1], self.config.normed, -1)
            streams = self.fc_norms(apart, execution).reshape(streams.shape)
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
