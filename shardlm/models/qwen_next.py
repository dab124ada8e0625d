"""Qwen3-Next (https://qwenlm.github.io/blog/qwen3_next): models/qwen_hybrid.py, whose projections of linear
attention have for each head of keys all that belongs to it side by side."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.models import qwen_hybrid
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.qwen_hybrid import MODULES, from_hf
from shardlm.models.transformer_config import TransformerConfig

__all__ = ["MODULES", "from_hf", "names"]


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = qwen_hybrid.names(config, block)
    return found | (_by_groups(block.attention) if isinstance(block.attention, DeltaNetConfig) else {})


def _by_groups(memory: DeltaNetConfig) -> Names:
    inside, G, H, V = f"{LAYER}linear_attn.", memory.num_heads // memory.num_kv_heads, memory.head_dim, memory.value_dim
    found, first = {}, 0
    for path, size, group in (("wq", H, None), ("wk", H, None), ("wv", G * V, (1, G)), ("wg", G * V, (1, G))):
        inner = ("X", first, 2 * (H + G * V))
        name = f"{inside}in_proj_qkvz.weight"
        found[f"attention.{path}"] = Tensor(name, "(K X) D -> D K X", inner=inner, group=group)
        first += size
    for path, first in (("beta", 0), ("decay", G)):
        inner = ("X", first, 2 * G)
        name = f"{inside}in_proj_ba.weight"
        found[f"attention.{path}"] = Tensor(name, "(K X) D -> D K X", inner=inner, group=(1, G))
    return found
