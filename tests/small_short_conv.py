"""A small decoder most of whose layers are gated short convolutions, beside small_hybrid.py's."""

import dataclasses

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.layers.stack import Segment
from shardlm.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class ConvHybrid:
    """As in the middle of LFM2. Eight parts divide over 8 devices."""

    vocab_size: int = 64
    embed_dim: int = 32

    def transformer(self) -> TransformerConfig:
        conv, wide = ShortConvConfig.of(8, 4, conv_width=3), MlpConfig(64)
        pattern = BlockConfig(conv, wide), BlockConfig(AttentionConfig(8, 2, 16), wide), BlockConfig(conv, wide)
        return TransformerConfig(self.vocab_size, self.embed_dim, (Segment(pattern, 2),))


CONV = ConvHybrid()
