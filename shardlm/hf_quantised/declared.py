"""How weights are held by what config.json says of them, before any is there: for plans. Where they are, `Grid` and its
like know it (grid.py)."""

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

from shardlm.hf_quantised import compressed, gptq
from shardlm.hf_quantised.kept import Kept

# Where methods list what they leave in 16 bits.
LEFT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_OF_COMPRESSED = {("int", 4): "int4", ("int", 2): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}
_OF_MODELOPT = {
    "FP8": Kept("fp8", 0, "float32", zeros=False),
    "FP8_PER_CHANNEL_PER_TOKEN": Kept("fp8", 0, "float32", zeros=False),
    "FP8_PB_WO": Kept("fp8", 128, "float32", zeros=False),
    "MXFP8": Kept("fp8", 32, "bfloat16", zeros=False),
    "NVFP4": Kept("fp4", 16, "float32", zeros=False),
    "W4A16_NVFP4": Kept("fp4", 16, "float32", zeros=False),
}


def declared(method: str, options: Mapping[str, Any], name: str) -> Kept | None:
    """Of the weight with this name in 16 bits, in a checkpoint of this method (hf_quantised.supported)."""
    module = name.removesuffix(".weight")
    left = [one for key in LEFT for one in options.get(key) or () if isinstance(one, str)]
    if any(_names(one, module) for one in left):
        return None
    if method in ("fp8", "fbgemm_fp8"):
        block = options.get("weight_block_size")
        return Kept("fp8", block[1] if block else 0, "float32", zeros=False)
    if method == "mxfp4":
        return Kept("fp4", 32, "bfloat16", zeros=False) if ".experts." in name else None
    if method == "modelopt":
        return _OF_MODELOPT.get(str(options.get("quant_algo")).upper())
    if method in ("gptq", "awq", "auto-round"):
        return _of_words(method, options)
    return _of_compressed(module, options) if method == "compressed-tensors" else None


def _of_words(method: str, options: Mapping[str, Any]) -> Kept | None:
    """GPTQ's, AWQ's and AutoRound's; lists of groups may be in any order where inputs were sorted (desc_act)."""
    group = options.get("group_size") or options.get("q_group_size") or (128 if method == "awq" else 0)
    if options.get("desc_act") and group > 0:
        return None
    bits = options.get("bits") or options.get("w_bit") or gptq.BITS[0]
    return Kept("int8" if bits == 8 else "int4", max(0, group), "float16", zeros=True)


def _of_compressed(module: str, options: Mapping[str, Any]) -> Kept | None:
    how = compressed.scheme(module, options.get("config_groups") or {}, "config.json")
    kind = "float" if "float" in str(how.get("type", "int")).lower() else "int"
    numbers = _OF_COMPRESSED.get((kind, how.get("num_bits") or 8))
    block, nested = how.get("block_structure"), how.get("strategy") == "tensor_group"
    group = block[1] if how.get("strategy") == "block" and isinstance(block, list) else how.get("group_size") or 0
    scale = "float32" if nested else "bfloat16"
    return numbers and Kept(numbers, max(0, group), scale, not how.get("symmetric", True))


def _names(pattern: str, module: str) -> bool:
    """Whether an entry of such a list means a module: its name or a part of it, a pattern with * or, behind re:, a
    regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(module, pattern) if "*" in pattern else pattern in module
