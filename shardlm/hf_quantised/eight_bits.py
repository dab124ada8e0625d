"""8-bit floats with scales: DeepSeek's in blocks, with V4's experts in 4-bit floats, vLLM's and AutoFP8's for a
tensor, Meta's (FBGEMM) for a row, and what NVIDIA's ModelOpt writes, 4-bit floats included."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import floats, fp4, one
from shardlm.hf_quantised.grid import Factors, Grid
from shardlm.hf_quantised.parts import misfit, missing, needed, only, split

PARTS = ("weight", "weight_scale_inv", "weight_scale", "weight_scale_2")
MX = 32  # columns that share an exponent in MXFP8 (the specification of codes.FP4, section 5.2)
NV = 16  # columns that share a scale in NVFP4
BLOCK = (128, 128)  # where a checkpoint does not say (https://arxiv.org/abs/2412.19437, section 3.3.2)
# https://github.com/vllm-project/vllm/blob/main/docs/features/quantization/modelopt.md; MIXED_PRECISION is these, each
# in some layers.
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION")


def check(options: Mapping[str, Any]) -> None:
    """Of quant_method fp8 and fbgemm_fp8."""
    size = options.get("weight_block_size")
    in_blocks = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    if size is not None and not in_blocks:
        raise ShardlmError(
            f"config.json has a quantization_config with weight_block_size={size!r}; it needs a list of two whole "
            "numbers, rows and columns. Download it again, or open a checkpoint in 16 bits"
        )
    only(options, "expert_dtype", "fp8", "fp4")


def check_modelopt(options: Mapping[str, Any]) -> None:
    if options.get("quant_algo"):  # of caches alone there is none
        only({**options, "quant_algo": str(options["quant_algo"]).upper()}, "quant_algo", *ALGORITHMS)


def read(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by the names that they have in 16 bits."""
    modules, found = split({_part(name, tensors): stored for name, stored in tensors.items()}, PARTS)
    for module, parts in modules.items():
        name, weight = f"{module}.weight", needed(module, parts, "weight")[0]
        if "weight_scale_2" in parts:
            found[name] = _nvfp4(module, parts)
        elif "weight_scale_inv" in parts or "weight_scale" in parts:
            found[name] = _scaled(module, parts, options.get("weight_block_size"))
        elif weight.dtype.itemsize == 1:
            scale = "weight_scale_inv" if options.get("weight_block_size") else "weight_scale"
            raise missing(weight, name, f"{module}.{scale}")
        else:
            found[name] = weight
    return found


def _part(name: str, tensors: Mapping[str, Stored]) -> str:
    """What a tensor is called; a scale is `scale` in DeepSeek V4, where other models have parameters of that name."""
    module, _, own = name.rpartition(".")
    weight = tensors.get(f"{module}.weight") if own == "scale" else None
    return f"{module}.weight_scale_inv" if weight is not None and weight.dtype.itemsize == 1 else name


def _scaled(module: str, parts: Mapping[str, Stored], size: list[int] | None) -> Grid:
    other = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    numbers, scales = parts["weight"], parts[other]
    if numbers.dtype in (np.int8, np.uint8) and len(numbers.shape) == 2:
        O, I = numbers.shape
        if scales.shape == (O, 2 * I // MX) and 2 * I % MX == 0:  # two 4-bit floats a byte
            return Grid(fp4(numbers), Factors(scales, scales.shape), (1, MX))
    of_floats = numbers.dtype.name.startswith("float8") and ("float" in scales.dtype.name or scales.dtype == np.uint8)
    if len(numbers.shape) != 2 or 0 in numbers.shape or not of_floats:
        raise misfit(f"{module}.weight", numbers, f"{module}.{other}", scales, "8-bit floats [O, I] and floats")
    cell = _cell(numbers, scales, tuple(size) if size else None)
    if cell is None:
        O, I = numbers.shape
        expected = f"a factor for the tensor, or {O} for its rows"
        if size:
            expected = f"a factor for each block of {tuple(size)}: {_count((O, I), size)}"
        raise misfit(f"{module}.weight", numbers, f"{module}.{other}", scales, expected)
    return Grid(floats(numbers), Factors(scales, _count(numbers.shape, cell)), cell)


def _cell(numbers: Stored, scales: Stored, size: tuple[int, int] | None) -> tuple[int, int] | None:
    """Rows and columns that share a scale, None where there are other numbers of scales than any way needs."""
    O, I = numbers.shape
    if one(scales.shape):
        return O, I
    if size:
        return size if scales.shape == _count((O, I), size) else None
    if scales.shape in ((O,), (O, 1)):
        return 1, I
    if scales.dtype == np.uint8:
        return (1, MX) if scales.shape == _count((O, I), (1, MX)) else None
    a, b = _count((O, I), BLOCK)
    return BLOCK if scales.shape in ((a, b), (a, 1, b, 1)) else None


def _nvfp4(module: str, parts: Mapping[str, Stored]) -> Grid:
    """Two 4-bit floats a byte, an 8-bit float for each 16 and a number that those are multiplied with."""
    packed, scales, common = needed(module, parts, "weight", "weight_scale", "weight_scale_2")
    fits = len(packed.shape) == 2 and packed.dtype == np.uint8 and scales.dtype.name.startswith("float8")
    if not fits or scales.shape != (packed.shape[0], 2 * packed.shape[1] // NV) or not one(common.shape):
        expected = f"uint8 [O, I / 2], 8-bit floats [O, I / {NV}] and a single weight_scale_2"
        raise misfit(f"{module}.weight", packed, f"{module}.weight_scale", scales, expected)
    return Grid(fp4(packed), Factors(scales, scales.shape, common), (1, NV))


def _count(shape: tuple[int, int], size) -> tuple[int, int]:
    return -(-shape[0] // size[0]), -(-shape[1] // size[1])
