"""K-EXAONE: EXAONE 4's attention, with norms before layers, a few dense layers, and experts as DeepSeek V3 has them."""

import dataclasses

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` exaone_moe. Layers without a window are not rotated where others have one."""
    pattern = options("sliding_window_pattern", None)
    period = len(pattern) if isinstance(pattern, str) else pattern or 4
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % period != 0)
    usual = hf_decoder.attention(options, length, qk_norm="head", norm=hf_decoder.rms(options))
    hybrid = options("sliding_window", 0) > 0

    def attention(layer: int) -> AttentionConfig:
        rope = None if hybrid and not windows[layer] else usual.rope
        return dataclasses.replace(usual, window=windows[layer], rope=rope)

    return deepseek.decoder(options, attention, deepseek.experts_of(options, third=True, normalize=True), first=1)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return {**deepseek.names(config, block), "mlp.router_bias": Tensor(f"{LAYER}mlp.e_score_correction_bias")}
