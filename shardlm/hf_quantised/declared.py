"""How weights are held by what config.json says of them, before any is there: for plans. Where they are, `Grid` and its
like know it (grid.py)."""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.hf_quantised import compressed, gptq
from shardlm.hf_quantised.kept import Kept
from shardlm.hf_quantised.parts import number

# Where methods list what they leave in 16 bits.
LEFT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
BEFORE = ("model.language_model.", "language_model.model.")  # of a module, in checkpoints that also see
NOT_HELD = Kept("", 0, "", zeros=False)
_OF_COMPRESSED = {("int", 4): "int4", ("int", 2): "int4", ("int", 8): "int8", ("float", 8): "fp8", ("float", 4): "fp4"}
_OF_MODELOPT = {
    "FP8": Kept("fp8", 0, "float32", zeros=False),
    "FP8_PER_CHANNEL_PER_TOKEN": Kept("fp8", 0, "float32", zeros=False),
    "FP8_PB_WO": Kept("fp8", 128, "float32", zeros=False),
    "MXFP8": Kept("fp8", 32, "bfloat16", zeros=False),
    "NVFP4": Kept("fp4", 16, "float32", zeros=False),
    "W4A16_NVFP4": Kept("fp4", 16, "float32", zeros=False),
}

Modules = Sequence[str]  # one module, by each name that lists may have for it
Look = Callable[[Modules], Kept | None]


def declared(method: str, options: Mapping[str, Any]) -> Callable[[str], Kept | None]:
    """By a weight's name in 16 bits, in a checkpoint of this method (hf_quantised.supported): how it is held, None
    where it is in 16 bits. Raises ShardlmError for lists of another form."""
    left, look = _left(method, options), _look(method, options)

    def of(name: str) -> Kept | None:
        module = name.removesuffix(".weight")
        modules = (module, *(before + module.removeprefix("model.") for before in BEFORE))
        return None if any(map(left, modules)) else look(modules)

    return of


def _left(method: str, options: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a module is left in 16 bits: its name, or a module's that it is inside of, or a part of that; a pattern
    with * or, behind re:, a regular expression. For AWQ any part of a name will do, as "gate" in "gate_proj"
    (exclude_layers_to_not_quantize in
    https://github.com/casper-hansen/AutoAWQ/blob/main/awq/quantize/quantizer.py)."""
    listed = [one.removesuffix(".weight") for key in LEFT for one in _list(options, key)]
    named = [one for one in listed if not one.startswith("re:")]
    patterns = [_pattern(one[3:]) for one in listed if one.startswith("re:")]
    globs = [fnmatch.translate(end) for one in named if "*" in one for end in (one, f"{one}.*")]
    patterns += [re.compile("|".join(globs))] if globs else []
    plain = {one.strip(".") for one in named if "*" not in one}

    def mean(module: str) -> bool:
        if any(pattern.match(module) for pattern in patterns):
            return True
        return any(one in module for one in plain) if method == "awq" else not plain.isdisjoint(_runs(module))

    return mean


def _runs(module: str) -> list[str]:
    """All parts of a name that are made of whole words between its dots."""
    words = module.split(".")
    return [".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)]


def _look(method: str, options: Mapping[str, Any]) -> Look:
    """How a module that is not left is held."""
    if method in ("fp8", "fbgemm_fp8"):
        block = options.get("weight_block_size")
        fp8 = Kept("fp8", block[1] if block else 0, "float32", zeros=False)
        fp4 = Kept("fp4", 32, "bfloat16", zeros=False) if options.get("expert_dtype") == "fp4" else fp8
        # What joins both inputs of a module for further tokens is in 16 bits without being listed (eh_proj in
        # https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/models/deepseek_nextn.py).
        # And so is what compressors and indexers of DeepSeek V4 project to (transformers' modeling_deepseek_v4.py).
        plain = (".eh_proj", ".compressor.wkv", ".compressor.wgate", ".weights_proj")
        return lambda modules: None if modules[0].endswith(plain) else fp4 if ".experts." in modules[0] else fp8
    if method == "mxfp4":
        mxfp4 = Kept("fp4", 32, "bfloat16", zeros=False)
        return lambda modules: mxfp4 if ".experts." in modules[0] else None
    if method == "modelopt":
        return _of_modelopt(options)
    if method in ("gptq", "awq", "auto-round"):
        return _of_words(method, options)
    return _of_compressed(options) if method == "compressed-tensors" else lambda modules: NOT_HELD


def _of_modelopt(options: Mapping[str, Any]) -> Look:
    """Of MIXED_PRECISION each module, or one that it is inside of, has an algorithm of its own."""
    algorithm, listed = str(options.get("quant_algo")).upper(), options.get("quantized_layers")
    if algorithm != "MIXED_PRECISION":
        return lambda modules: _OF_MODELOPT.get(algorithm)
    own = {
        name: _OF_MODELOPT.get(str(each.get("quant_algo")).upper())
        for name, each in (listed.items() if isinstance(listed, Mapping) else ())
        if isinstance(each, Mapping)
    }

    def look(modules: Modules) -> Kept | None:
        words = [module.split(".") for module in modules]
        names = (".".join(each[:n]) for each in words for n in range(len(each), 0, -1))
        return next((own[name] for name in names if name in own), None)

    return look


def _of_words(method: str, options: Mapping[str, Any]) -> Look:
    """GPTQ's, AWQ's and AutoRound's; lists of groups may be in any order where inputs were sorted (desc_act)."""
    named = [one for inner in _list(options, "modules_in_block_to_quantize", list) for one in inner]
    named += _list(options, "modules_in_block_to_quantize")
    blocks = options.get("block_name_to_quantize") or ()
    blocks = blocks.split(",") if isinstance(blocks, str) else _list(options, "block_name_to_quantize")

    def look(modules: Modules) -> Kept | None:
        of_block = not named or any(modules[0].endswith(f".{one}") for one in named if isinstance(one, str))
        inside = not blocks or any(module.startswith(one.strip()) for module in modules for one in blocks)
        own = _own(options, modules)
        if own is None or not (of_block and inside):
            return None
        group = number(own, "group_size") or number(own, "q_group_size") or (128 if method == "awq" else 0)
        if own.get("desc_act") and group > 0:
            return NOT_HELD
        bits = own.get("bits") or own.get("w_bit") or gptq.BITS[0]
        return Kept("int8" if bits == 8 else "int4", max(0, group), "float16", zeros=True)

    return look


def _own(options: Mapping[str, Any], modules: Modules) -> Mapping[str, Any] | None:
    """With what is said of single modules, None where they are left: by GPTQModel's patterns, with -: before those of
    modules that are left (https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/quantization/config.py,
    dynamic_get), or by AutoRound's names, 16 bits of those."""
    dynamic, extra = options.get("dynamic"), options.get("extra_config")
    for pattern, own in dynamic.items() if isinstance(dynamic, Mapping) else ():
        if any(_pattern(pattern.removeprefix("-:").removeprefix("+:")).match(module) for module in modules):
            return None if pattern.startswith("-:") else {**options, **(own if isinstance(own, Mapping) else {})}
    for name, own in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(own, Mapping) and any(name == module or _pattern(name).fullmatch(module) for module in modules):
            return None if (number(own, "bits") or 0) >= 16 else {**options, **own}
    return options


def _of_compressed(options: Mapping[str, Any]) -> Look:
    groups = options.get("config_groups") or {}

    def look(modules: Modules) -> Kept | None:
        found = compressed.targeted(modules, groups)
        if len(found) > 1:
            raise compressed.unclear(modules[0], groups, "config.json", several=True)
        return _of_scheme(found[0]) if found and found[0] else None

    return look


def _of_scheme(how: Mapping[str, Any]) -> Kept:
    """Where inputs were sorted they may be in any order, but for a sort that is undone before they are packed."""
    numbers = _OF_COMPRESSED.get((compressed.kind(how), how.get("num_bits") or 8))
    block, group, strategy = compressed.block(how), how.get("group_size") or 0, how.get("strategy")
    if strategy == "block" or (block and not strategy and group <= 0):
        whole = isinstance(block, list) and len(block) == 2 and all(type(n) is int for n in block)
        numbers, group = (numbers, block[1]) if whole else (None, 0)
    if not numbers or how.get("actorder") in (True, "group", "dynamic"):
        return NOT_HELD
    scale = "float32" if strategy == "tensor_group" else "bfloat16"
    return Kept(numbers, max(0, group), scale, not how.get("symmetric", True))


def _list(options: Mapping[str, Any], key: str, kind: type = str) -> list:
    found = options.get(key) or []
    return [one for one in found if isinstance(one, kind)] if isinstance(found, list) else []


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ShardlmError(
            f"config.json has a quantization_config with the pattern {text!r}, which is none: {error}. Download it "
            "again"
        ) from error
