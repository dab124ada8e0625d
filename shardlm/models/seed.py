"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss): Llama's decoder with biases on queries, keys and values."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` seed_oss."""
    options("residual_dropout", 0.0)  # of training, as attention_dropout is
    biases = {"bias": bool(options("attention_bias", True)), "out_bias": bool(options("attention_out_bias", False))}
    block = BlockConfig(hf_decoder.attention(options, length, **biases), hf_decoder.mlp(options))
    return hf_decoder.decoder(options, lambda layer: block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard()
