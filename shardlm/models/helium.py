"""Helium 1 (https://kyutai.org/2025/04/30/helium.html): Llama's decoder, rotated in adjacent pairs."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, in_pairs, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` helium."""
    block = BlockConfig(hf_decoder.attention(options, length, out_bias=False), hf_decoder.mlp(options))
    return hf_decoder.decoder(options, lambda layer: block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard()
    return found | in_pairs(found, block.attention.head_dim)
