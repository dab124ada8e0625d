"""GPTQ (https://arxiv.org/abs/2210.17323) and AWQ (https://arxiv.org/abs/2306.00978): integers [I, O] packed into
words, with scales and zeros for groups of inputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import Packed, fits, whole
from shardlm.hf_quantised.grid import Factors, Grid
from shardlm.hf_quantised.parts import misfit, missing, needed, only, split

PARTS = ("weight", "qweight", "qzeros", "scales", "g_idx")
BITS = (4, 2, 8)  # those of 3 lie across words
# Which of a word's codes a column is, so that neighbours lie 16 bits apart
# (https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py).
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def check(options: Mapping[str, Any]) -> None:
    """Of quant_method gptq."""
    only(options, "bits", *BITS)
    only({**options, "checkpoint_format": _format(options)}, "checkpoint_format", "gptq", "gptq_v2")
    only(options, "is_marlin_format", False)
    only(options, "pack_dtype", "int32", "torch.int32")


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
        words, of_zeros, scales = needed(module, parts, "qweight", "qzeros", "scales")
        listed, bits = parts.get("g_idx"), options.get("bits") or BITS[0]
        if listed is not None and len(words.shape) == 2:  # some modules may have bits of their own
            inputs = listed.shape[0]
            bits = next((n for n in BITS if n * inputs == 32 * words.shape[0]), bits)
        else:
            inputs = 32 * words.shape[0] // bits
        outputs, group = scales.shape[-1], options.get("group_size") or -1
        right = _right(words, of_zeros, scales) and words.shape[1] == outputs and fits(of_zeros, bits, 1, outputs)
        if not right or not fits(words, bits, 0, inputs):
            expected = f"int32 [I * {bits} / 32, O], and int32 [G, O * {bits} / 32] beside scales [G, O]"
            raise misfit(f"{module}.qweight", words, f"{module}.qzeros", of_zeros, expected)
        size = group if group > 0 else inputs
        if listed is None and -(-inputs // size) != scales.shape[0]:
            raise misfit(f"{module}.qweight", words, f"{module}.scales", scales, f"scales of groups of {size}")
        ones = sum(1 << shift for shift in range(0, 31, bits)) if _format(options) == "gptq" else 0
        zeros = whole(Packed(of_zeros, bits, 1, outputs, added=ones))
        numbers, factors = whole(Packed(words, bits, 0, inputs)), Factors(scales, scales.shape)
        found[f"{module}.weight"] = Grid(numbers, factors, (size, 1), zeros, listed, turned=True)
    return found


def read_awq(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """AWQ's weights by the names that they have in 16 bits."""
    modules, found = split(tensors, PARTS)
    for module, parts in modules.items():
        if "qweight" not in parts:
            found |= _plain(module, parts)
            continue
        words, of_zeros, scales = needed(module, parts, "qweight", "qzeros", "scales")
        inputs, outputs, groups = words.shape[0], scales.shape[-1], scales.shape[0]
        right = _right(words, of_zeros, scales) and inputs % groups == 0 and 8 * words.shape[1] == outputs
        if not right or of_zeros.shape[1] != words.shape[1]:
            expected = "int32 [I, O / 8], and int32 [G, O / 8] beside scales [G, O]"
            raise misfit(f"{module}.qweight", words, f"{module}.qzeros", of_zeros, expected)
        numbers, zeros = (whole(Packed(a, 4, 1, outputs, AWQ_ORDER)) for a in (words, of_zeros))
        size = (inputs // groups, 1)
        found[f"{module}.weight"] = Grid(numbers, Factors(scales, scales.shape), size, zeros, turned=True)
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
    return kinds and two and zeros.shape[0] == scales.shape[0]
