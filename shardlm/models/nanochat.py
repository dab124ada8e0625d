"""nanochat (https://github.com/karpathy/nanochat): norms without scales, one of them on the embedding and others on
queries and keys after a rotation the other way, squared ReLU without a gate, a soft cap on logits."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, linear, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` nanochat."""
    norm = dataclasses.replace(hf_decoder.rms(options), scaled=False)
    attention = hf_decoder.attention(options, length, qk_norm="head", norm=norm, norm_rotated=True)
    attention = dataclasses.replace(attention, rope=dataclasses.replace(attention.rope, backwards=True))
    block = BlockConfig(attention, hf_decoder.mlp(options, gated=False))
    cap = LogitsConfig(softcap=float(options("final_logit_softcapping", 0.0)))
    return hf_decoder.decoder(options, lambda layer: block, norm, logits=cap, embed_norm=norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard() | linear("mlp.up", f"{LAYER}mlp.fc1", "into") | linear("mlp.down", f"{LAYER}mlp.fc2", "out")
