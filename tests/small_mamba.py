"""A small decoder most of whose layers are Mamba 2, beside small_hybrid.py's."""

import dataclasses

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.mlp import MlpConfig, NoMlpConfig
from shardlm.layers.stack import Segment
from shardlm.models.transformer_config import TransformerConfig


@dataclasses.dataclass(frozen=True)
class MambaHybrid:
    """As in the middle of Nemotron-H: blocks with and without a feed-forward layer. Eight heads divide over 8 devices,
    and their two groups do not."""

    vocab_size: int = 64
    embed_dim: int = 32

    def transformer(self) -> TransformerConfig:
        memory = MambaConfig(num_heads=8, num_kv_heads=2, head_dim=8, value_dim=6)
        attention, wide = AttentionConfig(8, 2, 16, rope=None), MlpConfig(64, "relu2", gated=False)
        pattern = BlockConfig(memory, wide), BlockConfig(memory, NoMlpConfig()), BlockConfig(attention, wide)
        return TransformerConfig(self.vocab_size, self.embed_dim, (Segment(pattern, 2),))


@dataclasses.dataclass(frozen=True)
class MambaBeside:
    """As Falcon H1: layers that attend and remember."""

    vocab_size: int = 64
    embed_dim: int = 32

    def transformer(self) -> TransformerConfig:
        memory = MambaConfig(num_heads=8, num_kv_heads=2, head_dim=8, value_dim=6, norms="none")
        block = BlockConfig(AttentionConfig(8, 2, 16), MlpConfig(64), memory=memory)
        return TransformerConfig(self.vocab_size, self.embed_dim, (Segment((block,), 3),))


MAMBA = MambaHybrid()
BESIDE = MambaBeside()
