"""Mistral (https://arxiv.org/abs/2310.06825): Llama's decoder with a sliding window."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mistral."""
    windows = hf_decoder.sliding(options, lambda layer: True)
    feed_forward = hf_decoder.mlp(options)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(hf_decoder.attention(options, length, window=windows[layer]), feed_forward)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard()
