"""EXAONE 4 (https://arxiv.org/abs/2507.11407): norms after each layer and on the queries and keys of each head; the
larger ones have sliding windows between layers that see everything and are not rotated."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` exaone4."""
    pattern = options("sliding_window_pattern", None)
    period = len(pattern) if isinstance(pattern, str) else pattern or 4  # "LLLG": local, local, local, global
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % period != 0)
    hybrid = options("sliding_window", 0) > 0
    norm, feed_forward = hf_decoder.rms(options), hf_decoder.mlp(options)
    plain = hf_decoder.attention(options, length).rope

    def block(layer: int) -> BlockConfig:
        own = {"window": windows[layer], "rope": None if hybrid and not windows[layer] else plain}
        return BlockConfig(hf_decoder.attention(options, qk_norm="head", norm=norm, **own), feed_forward, norms="post")

    return hf_decoder.decoder(options, block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
