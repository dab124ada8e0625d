"""Where a GGUF file has the tensors of linear attention of Qwen3-Next and Qwen 3.5, whose converters
(https://github.com/ggml-org/llama.cpp/blob/master/conversion/qwen.py) order heads otherwise than Hugging Face: of
Qwen3-Next all queries, all keys and all values together, of 3.5 heads of values by their place in a group."""

import dataclasses
from collections.abc import Iterator

from shardlm.gguf_files.forms import Order, Place
from shardlm.gguf_files.header import Block, Gguf
from shardlm.gguf_files.told import Told

ARCHITECTURES = ("qwen3next", "qwen35", "qwen35moe")


def memory(gguf: Gguf, architecture: str, own: dict[str, Block]) -> Iterator[tuple[str, Place]]:
    """(name, where it is) of a layer's tensors, which are taken out of `own`; none of a layer that attends."""
    if not any(name.startswith("ssm_") for name in own):
        return
    told = Told(gguf.metadata, architecture)
    K, V, size = told.count("ssm.group_count"), told.count("ssm.time_step_rank"), told.count("ssm.state_size")
    each = told.count("ssm.inner_size") // V
    tiled = architecture != "qwen3next" and K != V
    wholes, columns = (Order(first, K, V // K, each) if tiled else None for first in (2 * K * size, 0))
    heads = Order(0, K, V // K) if tiled else None
    plain = {
        "attn_qkv.weight": ("in_proj_qkv.weight", wholes),
        "attn_gate.weight": ("in_proj_z.weight", columns),
        "ssm_alpha.weight": ("in_proj_a.weight", heads),
        "ssm_beta.weight": ("in_proj_b.weight", heads),
        "ssm_dt.bias": ("dt_bias", heads),
        "ssm_norm.weight": ("norm.weight", None),
        "ssm_ba.weight": ("in_proj_ba.weight", None),
        "ssm_in.weight": ("in_proj_qkvz.weight", None),  # of Qwen3-Next's first files
    }
    before = "linear_attn."
    if architecture == "qwen3next" and {"attn_qkv.weight", "attn_gate.weight"} <= own.keys():
        both = own.pop("attn_qkv.weight"), own.pop("attn_gate.weight")
        parts = K, size, size, V // K * each, V // K * each
        yield f"{before}in_proj_qkvz.weight", Place("by_groups", both, groups=parts)
    for name, (theirs, order) in plain.items():
        if name in own:
            yield before + theirs, Place("plain", (own.pop(name),), order)
    if "ssm_a" in own:
        yield f"{before}A_log", Place("rate", (own.pop("ssm_a"),), heads)
    if "ssm_out.weight" in own:
        yield f"{before}out_proj.weight", Place("columns", (own.pop("ssm_out.weight"),), columns)
    if (taps := own.pop("ssm_conv1d.weight", None)) is not None:
        taps = dataclasses.replace(taps, shape=(taps.shape[0], 1, taps.shape[-1]))
        yield f"{before}conv1d.weight", Place("plain", (taps,), wholes)
