"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models): Llama's decoder with factors on embedding,
residuals, scores and logits."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` granite."""
    attention = hf_decoder.attention(options, length, scale=float(options("attention_multiplier", 1.0)))
    scale = float(options("residual_multiplier", 1.0))
    block = BlockConfig(attention, hf_decoder.mlp(options), residual_scale=scale)
    return hf_decoder.decoder(
        options,
        lambda layer: block,
        hf_decoder.rms(options),
        embed_scale=float(options("embedding_multiplier", 1.0)),
        logits=LogitsConfig(scale=1 / options("logits_scaling", 1.0)),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard()
