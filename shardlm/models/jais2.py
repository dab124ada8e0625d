"""Jais 2 (https://huggingface.co/inceptionai/Jais-2-8B-Chat): Llama's decoder with layer norms, biases, and squared
ReLU without a gate."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.nemotron import names as names
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` jais2."""
    bias = {name: bool(options(name, True)) for name in ("attention_bias", "mlp_bias")}
    attention = hf_decoder.attention(options, length, bias=bias["attention_bias"], out_bias=bias["attention_bias"])
    block = BlockConfig(attention, hf_decoder.mlp(options, gated=False, bias=bias["mlp_bias"]))
    return hf_decoder.decoder(options, lambda layer: block, NormConfig("layer", options("layer_norm_eps", 1e-5)))
