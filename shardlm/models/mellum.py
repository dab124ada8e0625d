"""Mellum 2 (https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base): Qwen 3's mixture, with a window in some layers,
which have a rotation of their own, and dense layers where config.json says so."""

import re
from collections.abc import Mapping
from typing import Any

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.deepseek import mixed_layers
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.qwen import experts_of
from shardlm.models.qwen import names as names
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope

THETAS = {"full_attention": 500_000.0, "sliding_attention": 10_000.0}  # where config.json says nothing
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types", "mtp_mlp_layer_types")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mellum. The module that predicts a further token is left aside."""
    options.where_absent(norm_topk_prob=True, sliding_window=1024)
    options.aside(*FURTHER)
    norm, windows = hf_decoder.rms(options), hf_decoder.sliding(options, lambda layer: False)
    ropes = {windowed: _rope(options, windowed, length) for windowed in (True, False)}
    dense, sparse = hf_decoder.mlp(options), experts_of(options, "mellum")
    mixed = mixed_layers(options, first=0)

    def block(layer: int) -> BlockConfig:
        window = windows[layer]
        attention = hf_decoder.attention(options, window=window, rope=ropes[window > 0], qk_norm="head", norm=norm)
        return BlockConfig(attention, sparse if mixed[layer] else dense)

    return hf_decoder.decoder(options, block, norm)


def _rope(options: Options, windowed: bool, length: int) -> Rope:
    """Of the layers with a window, or of those without."""
    kind = "sliding_attention" if windowed else "full_attention"
    if not options("rope_parameters", None):
        return Rope(THETAS[kind])
    return rope_of(options, options("head_dim"), kind, length)


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """The module that predicts a further token."""
    return re.compile(r"mtp\.")
