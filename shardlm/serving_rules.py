"""Where the weights of a model rest that is served: where they are used, so that no step gathers any over the expert
axis. What is beside the routed experts is split over that axis as over tensor, where it divides."""

import functools
import math

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.compressed_attention import CompressedConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
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


def split_pages(rules: Rules, shape: TransformerConfig, ways: int, page_size: int) -> Rules:
    """The tables of a served model where the positions of each page are split over so many of the devices that would
    each have a copy of it (ops/split_pages.py). Raises ShardlmError for what cannot be split so."""
    if ways == 1:
        return rules
    axes, asked = rules.act.axes("heads"), f"decode_context_parallel_size={ways}"
    devices = rules.mesh.size(*axes)
    for attention in shape.attention_kinds:
        _check_split(attention, asked, devices)
    if shape.reads or shape.sparse or shape.compressed or len(shape.kept_heads) > 1:
        raise ShardlmError(
            f"{asked}: layers of the model read others' pages, choose tokens of them or keep heads of different sizes, "
            "which is not split so; set it to 1"
        )
    found = page_axes(rules, shape)
    if ways not in found:
        works = ", ".join(map(str, sorted({1, *found})))
        raise ShardlmError(
            f"{asked}: heads are split over {devices} devices of {rules.mesh}, which have copies of keys and values; "
            f"choose from {works}{_other_remedy(shape, ways, devices)}"
        )
    if page_size % ways:
        raise ShardlmError(
            f"{asked} does not divide pages of block_size={page_size} tokens; choose a block_size of "
            f"{math.lcm(page_size, ways)}"
        )
    _check_windows(shape, asked, ways, page_size)
    return rules.with_split_pages(found[ways])


def _check_windows(shape: TransformerConfig, asked: str, ways: int, page_size: int) -> None:
    """Raises ShardlmError where a device would have more of one window of positions than of another: those that are no
    whole pages."""
    windows = {attention.window for attention in shape.attention_kinds} - {0}
    if not any(window % page_size for window in windows):
        return
    every = math.gcd(*windows)
    sizes = [size for size in range(ways, every + 1, ways) if every % size == 0]
    best = max((size for size in sizes if size <= page_size), default=min(sizes, default=0))
    raise ShardlmError(
        f"{asked}: layers see {' or '.join(map(str, sorted(windows)))} tokens, and no whole pages of "
        f"block_size={page_size}; {f'choose a block_size of {best}' if best else 'set it to 1'}"
    )


def page_axes(rules: Rules, shape: TransformerConfig) -> dict[int, tuple[str, ...]]:
    """Over how many of the devices that heads are split over positions of pages may be, and over which axes: over all,
    and those of one axis where each query may be answered by any of them, of latents alone."""
    axes = rules.act.axes("heads")
    subsets = (axes, *((axis,) for axis in axes)) if _latents(shape) and len(axes) > 1 else (axes,)
    return {rules.mesh.size(*some): some for some in subsets if some}


def _latents(shape: TransformerConfig) -> bool:
    return all(isinstance(attention, MlaConfig) for attention in shape.attention_kinds)


def _other_remedy(shape: TransformerConfig, ways: int, devices: int) -> str:
    """What to do instead where positions are not split over so many of the devices alone."""
    if devices % ways:
        return ""
    if not _latents(shape):  # vLLM's devices have one of the kv heads each, and it counts the copies of that one
        return f". Each of them has all kv heads, so that {devices} hold a position once"
    experts = any(isinstance(block.mlp, MoeConfig) for block in shape.all_blocks())
    return f", or a mesh such as expert={devices // ways} tensor={ways}" if experts else ""


def _check_split(attention: Attention, asked: str, devices: int) -> None:
    """Raises ShardlmError where pages of this attention, its heads over so many devices, are not split."""
    if isinstance(attention, MlaConfig):
        return
    if not isinstance(attention, AttentionConfig) or attention.chunk:
        raise ShardlmError(f"{asked}: layers of the model see a part of the positions alone; set it to 1")
    if attention.num_kv_heads % devices == 0:
        raise ShardlmError(
            f"{asked}: each of the {devices} devices has kv heads of its own of {attention.num_kv_heads} already, and "
            "none of them a copy; set it to 1"
        )
