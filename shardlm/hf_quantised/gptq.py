"""GPTQ (https://arxiv.org/abs/2210.17323), AWQ (https://arxiv.org/abs/2306.00978) and AutoRound, which writes as they
do: integers [I, O] packed into words, with scales and zeros for groups of inputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import Packed, fits, whole
from shardlm.hf_quantised.grid import Factors, Grid
from shardlm.hf_quantised.parts import a_list, misfit, missing, needed, number, only, split

PARTS = ("weight", "qweight", "qzeros", "scales", "g_idx")
BITS = (4, 2, 8)  # those of 3 lie across words
# Which of a word's codes a column is, so that neighbours lie 16 bits apart
# (https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py).
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# https://github.com/intel/auto-round/blob/main/auto_round/inference/backend.py (GPTQ_FORMAT and those after it)
AUTO_ROUND = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}


def check(options: Mapping[str, Any]) -> None:
    """Of quant_method gptq."""
    only(options, "bits", *BITS)
    only({**options, "checkpoint_format": _format(options)}, "checkpoint_format", "gptq", "gptq_v2")
    only(options, "is_marlin_format", False)
    only(options, "pack_dtype", "int32", "torch.int32")


def check_auto_round(options: Mapping[str, Any]) -> None:
    """Of quant_method auto-round (https://arxiv.org/abs/2309.05516), which packs as one of the others."""
    form = only(options, "packing_format", *AUTO_ROUND)
    only(options, "bits", *((4,) if AUTO_ROUND[form] == "awq" else BITS))
    only(options, "data_type", "int")
    only(options, "act_bits", 16, 32)


def check_awq(options: Mapping[str, Any]) -> None:
    """Of quant_method awq."""
    only(options, "bits", 4)
    only({**options, "version": str(options.get("version") or "gemm").lower()}, "version", "gemm")
    only(options, "zero_point", True)


def _format(options: Mapping[str, Any]) -> str:
    """GPTQModel writes it under another name than AutoGPTQ, or under both."""
    return options.get("checkpoint_format") or options.get("format") or "gptq"


def read(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """GPTQ's weights by the names that they have in 16 bits.

    What is published as gptq holds each zero less one. The one is added to whole words, as GPTQModel does
    (convert_gptq_v1_to_v2_format_module in
    https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/utils/model.py): what it borrowed is paid back.
    """
    modules, found = split(tensors, PARTS)
    for module, parts in modules.items():
        if "qweight" not in parts:
            found |= _plain(module, parts)
            continue
        # What AutoRound says of modules of their own.
        extra = options.get("extra_config")
        own = extra.get(module) if isinstance(extra, Mapping) else None
        own = own if isinstance(own, Mapping) else {}
        found[f"{module}.weight"] = _gptq(module, parts, {**options, **own})
    return found


def _gptq(module: str, parts: Mapping[str, Stored], options: Mapping[str, Any]) -> Grid:
    words, of_zeros, scales = needed(module, parts, "qweight", "qzeros", "scales")
    listed, bits = parts.get("g_idx"), options.get("bits") or BITS[0]
    right = _right(words, of_zeros, scales) and (listed is None or a_list(listed))
    inputs = 0
    if right:
        inputs = 32 * words.shape[0] // bits if listed is None else listed.shape[0]
        if listed is not None:  # of GPTQModel's modules some may have bits of their own, by a pattern
            bits = next((n for n in BITS if n * inputs == 32 * words.shape[0]), bits)
        right = words.shape[1] == scales.shape[1] and fits(words, bits, 0, inputs)
    if not right or not fits(of_zeros, bits, 1, scales.shape[1]):
        expected = f"int32 [I * {bits} / 32, O], and int32 [G, O * {bits} / 32] beside scales [G, O]"
        raise misfit(f"{module}.qweight", words, f"{module}.qzeros", of_zeros, expected)
    groups, outputs = scales.shape
    size = number(options, "group_size") or -1
    size = size if size > 0 else inputs
    if listed is None and -(-inputs // size) != groups:
        raise misfit(f"{module}.qweight", words, f"{module}.scales", scales, f"scales of groups of {size}")
    ones = sum(1 << place for place in range(0, 32, bits)) if _format(options) == "gptq" else 0
    zeros = whole(Packed(of_zeros, bits, 1, outputs, added=ones))
    numbers = whole(Packed(words, bits, 0, inputs))
    return Grid(numbers, Factors(scales, (groups, outputs)), (size, 1), zeros, listed, turned=True)


def read_auto_round(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """AutoRound's weights by the names that they have in 16 bits."""
    form = AUTO_ROUND[options.get("packing_format") or next(iter(AUTO_ROUND))]
    return read_awq(tensors, options) if form == "awq" else read(tensors, {**options, "checkpoint_format": form})


def read_awq(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """AWQ's weights by the names that they have in 16 bits."""
    modules, found = split(tensors, PARTS)
    for module, parts in modules.items():
        if "qweight" not in parts:
            found |= _plain(module, parts)
            continue
        words, of_zeros, scales = needed(module, parts, "qweight", "qzeros", "scales")
        if not _right(words, of_zeros, scales) or not _of_awq(words, of_zeros, scales):
            expected = "int32 [I, O / 8], and int32 [G, O / 8] beside scales [G, O]"
            raise misfit(f"{module}.qweight", words, f"{module}.qzeros", of_zeros, expected)
        groups, outputs = scales.shape
        numbers, zeros = (whole(Packed(a, 4, 1, outputs, AWQ_ORDER)) for a in (words, of_zeros))
        size = (words.shape[0] // groups, 1)
        found[f"{module}.weight"] = Grid(numbers, Factors(scales, (groups, outputs)), size, zeros, turned=True)
    return found


def _plain(module: str, parts: Mapping[str, Stored]) -> dict[str, Stored]:
    if "weight" not in parts:
        there = next(iter(parts))
        raise missing(parts[there], f"{module}.{there}", f"{module}.qweight")
    return {f"{module}.weight": parts["weight"]}


def _right(words: Stored, zeros: Stored, scales: Stored) -> bool:
    """Whether all are matrices of their kinds, with as many groups of zeros as of scales."""
    kinds = words.dtype == zeros.dtype == np.int32 and "float" in scales.dtype.name
    two = len(words.shape) == len(zeros.shape) == len(scales.shape) == 2
    return kinds and two and 0 not in words.shape and zeros.shape[0] == scales.shape[0] > 0


def _of_awq(words: Stored, zeros: Stored, scales: Stored) -> bool:
    groups, outputs = scales.shape
    return words.shape[0] % groups == 0 and outputs == 8 * words.shape[1] == 8 * zeros.shape[1]
