"""What of a serving plan was not held to compiled programs: seconds of layers that no compiled one has had."""

from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.lightning import LightningConfig
from shardlm.layers.pooled_indexer import PooledIndexerConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.models.transformer_config import TransformerConfig


def doubt(shape: TransformerConfig) -> str:
    """In words; "" where there is nothing of it."""
    choosers = [getattr(block.attention, "indexer", None) for block in shape.kinds]
    there = {
        "lightning attention": any(isinstance(block.attention, LightningConfig) for block in shape.kinds),
        "kv heads that choose blocks for themselves": any(isinstance(one, HeadIndexerConfig) for one in choosers),
        "chosen pools of tokens": any(isinstance(one, PooledIndexerConfig) for one in choosers),
        "mixtures that are added a layer later": isinstance(shape.streams, ShortcutConfig),
    }
    names = [name for name, holds in there.items() if holds]
    return f"seconds of {' and '.join(names)} were not compared with compiled programs" if names else ""
