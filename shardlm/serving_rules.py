"""Where the weights of a model rest that is served: where they are used, so that no step gathers any over the expert
axis. What is beside the routed experts is split over that axis as over tensor, where it divides."""

import functools

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.mesh import MeshSpec
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.weight_format import DYNAMIC, WeightFormat, groups_of, weight_key
from shardlm.rules import Preset, Rules

Attention = AttentionConfig | MlaConfig | DeltaNetConfig | CompressedConfig


@functools.lru_cache(maxsize=1024)
def serving_rules(
    shape: TransformerConfig, mesh: MeshSpec, held: WeightFormat = "dtype", preset: Preset = "zero3"
) -> Rules:
    """The tables of an architecture whose projections are held so, on a mesh whose sizes are all known.

    A device of the expert axis reads a part of the dense weights, and keeps a part of the cache, where it would read
    and keep all of both: DeepSeek V3 has 34 GB of dense weights in 16 bits. The price is a sum over more devices.
    """
    devices = mesh.size("expert", "tensor")
    divides = {
        "heads": all(_heads_divide(a, devices, mesh.tensor) for block in shape.all_blocks() for a in block.mixers),
        "mlp": all(_width_divides(width, devices, held) for width in _dense_widths(shape)),
        "vocab": shape.vocab_size % devices == 0,
    }
    divides["kv_heads"] = divides["heads"]
    spread = tuple(name for name, does in divides.items() if does)
    return Rules.make(preset, mesh).fitting(shape.widths()).for_serving(spread)


def _heads_divide(attention: Attention, devices: int, tensor: int) -> bool:
    """Also where kv heads stay whole, unless they are split over tensor: each device would have a larger cache."""
    if attention.num_heads % devices:
        return False
    if isinstance(attention, MambaConfig):
        return 0 in (attention.num_kv_heads % devices, devices % attention.num_kv_heads)
    if isinstance(attention, DeltaNetConfig):
        return attention.num_kv_heads % devices == 0
    if isinstance(attention, CompressedConfig):
        return attention.out_groups % devices == 0
    if isinstance(attention, MlaConfig):
        return True  # all heads share one latent, which each device has
    kv_heads = attention.num_kv_heads
    return kv_heads % devices == 0 or (devices % kv_heads == 0 and (tensor == 1 or kv_heads % tensor > 0))


def _dense_widths(shape: TransformerConfig) -> set[int]:
    """Of the hidden layers of MLPs and shared experts."""
    mlps = {block.mlp for block in shape.all_blocks()}
    widths = {mlp.mlp_dim if isinstance(mlp, MlpConfig) else mlp.shared_dim for mlp in mlps if mlp.there}
    return widths - {0}


def _width_divides(width: int, devices: int, held: WeightFormat) -> bool:
    """In whole groups of what is held in them: of the weights that sum over a width, "down"."""
    names = () if held in DYNAMIC else (weight_key("down", "mlp", place) for place in ("", "shared.", "mtp."))
    groups = [width // found.size(width) for name in names if (found := groups_of(held, name))]
    return all(n % devices == 0 for n in (width, *groups))
