"""compressed-tensors, which llm-compressor writes: floats and integers of 8 bits, integers packed into words, 4-bit
floats (https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/compressors)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.hf_files import Stored
from shardlm.hf_quantised.codes import Numbers, Packed, fits, floats, fp4, one, whole
from shardlm.hf_quantised.grid import Factors, Grid
from shardlm.hf_quantised.parts import a_list, misfit, missing, needed, number, only, split

PARTS = (
    *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "weight_global_scale",
)
FORMATS = (
    *("dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)
BITS = (2, 4, 8)  # those of others lie across words, in two ways by the library's version


def check(options: Mapping[str, Any]) -> None:
    only(options, "format", *FORMATS)
    for name in ("sparsity_config", "transform_config"):
        inside = options.get(name) or {}
        if not isinstance(inside, Mapping) or (inside.get("format") != "dense" and any(inside.values())):
            raise ShardlmError(
                f"config.json has a quantization_config with {name}={inside!r}; weights that are packed sparsely "
                "or rotated while the model runs are not supported. Open a checkpoint in 16 bits"
            )
    groups = options.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, Mapping) else [("", groups)]:
        if not _sound(group):
            raise ShardlmError(
                f"config.json has config_groups[{name!r}]={group!r}; a group with targets and weights is needed. Open "
                "another quantisation of the model, or one in 16 bits"
            )
        only({**options, **group}, "format", *FORMATS)
        weights = group.get("weights") or {}
        number(weights, "group_size")
        if kind(weights) == "int":
            only({**weights, "quant_method": options.get("quant_method")}, "num_bits", 8, *BITS)


def _sound(group: Any) -> bool:
    """Whether it is an object with a list of names and patterns, and weights that are an object if any."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights") or {}, Mapping):
        return False
    targets = group.get("targets") or []
    return isinstance(targets, list) and all(isinstance(target, str) and _compiles(target) for target in targets)


def _compiles(target: str) -> bool:
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error:
        return False
    return True


def read(tensors: Mapping[str, Stored], options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights by the names that they have in 16 bits."""
    modules, found = split(tensors, PARTS)
    for module, parts in modules.items():
        if "weight_packed" not in parts and "weight_scale" not in parts:
            weight = needed(module, parts, "weight")[0]
            if weight.dtype.itemsize == 1:
                raise missing(weight, f"{module}.weight", f"{module}.weight_scale")
            found[f"{module}.weight"] = weight
            continue
        own = scheme(module, options.get("config_groups") or {}, str(next(iter(parts.values())).file))
        if "weight_packed" not in parts:
            found[f"{module}.weight"] = _bytes(module, parts, own)
        elif parts["weight_packed"].dtype == np.uint8:
            found[f"{module}.weight"] = _fp4(module, parts, own)
        else:
            found[f"{module}.weight"] = _packed(module, parts, own)
    return found


def scheme(module: str, groups: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """How the weights of a module that is quantised are held. Raises ShardlmError, with the file, where that is not
    clear."""
    if len(groups) == 1:
        return next(iter(groups.values())).get("weights") or {}
    found = targeted((module,), groups)
    if len(found) != 1:
        raise unclear(module, groups, file, several=bool(found))
    return found[0]


def targeted(modules: Sequence[str], groups: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What groups say of the weights of a module, by any of its names: the one that names it, else those that name its
    class, as Linear, or nothing."""
    of_class = []
    for group in groups.values():
        targets = group.get("targets") or ()
        if any(_names(target, module) for target in targets for module in modules):
            return [group.get("weights") or {}]
        if not targets or any(re.fullmatch(r"[A-Z]\w*", target) for target in targets):
            of_class.append(group.get("weights") or {})
    return of_class


def _names(target: str, module: str) -> bool:
    return target == module or (target.startswith("re:") and re.match(target[3:], module) is not None)


def unclear(module: str, groups: Mapping[str, Any], file: str, *, several: bool) -> ShardlmError:
    return ShardlmError(
        f"{file}: {module} is quantised, and of the config_groups {', '.join(groups)} of config.json "
        f"{'several' if several else 'none'} may hold for it; a target that names it is needed. Download it again"
    )


def kind(scheme: Mapping[str, Any]) -> str:
    """ "int" or "float"."""
    return "float" if "float" in str(scheme.get("type", "int")).lower() else "int"


def block(scheme: Mapping[str, Any]) -> Any:
    """Rows and columns of a block, as they are told; None: there are none."""
    told = scheme.get("block_structure")
    return [int(n) for n in told.split("x")] if isinstance(told, str) and re.fullmatch(r"\d+x\d+", told) else told


def _bytes(module: str, parts: Mapping[str, Stored], scheme: Mapping[str, Any]) -> Grid:
    weight, scales = needed(module, parts, "weight", "weight_scale")
    if len(weight.shape) != 2 or weight.dtype.itemsize != 1:
        expected = "8-bit numbers [O, I] and their scales"
        raise misfit(f"{module}.weight", weight, f"{module}.weight_scale", scales, expected)
    size, cells = _cells(module, weight, weight.shape, scales, scheme)
    zeros = None
    if not scheme.get("symmetric", True):
        zeros = _plain_zeros(module, needed(module, parts, "weight_zero_point")[0], cells)
    return Grid(floats(weight), Factors(scales, cells), size, zeros)


def _packed(module: str, parts: Mapping[str, Stored], scheme: Mapping[str, Any]) -> Grid:
    """Integers of 2, 4 or 8 bits in words of 32, along the inputs, as codes that are half their range larger."""
    words, scales, shape = needed(module, parts, "weight_packed", "weight_scale", "weight_shape")
    bits = scheme.get("num_bits") or 8
    O, I = (int(n) for n in shape.read(...)) if shape.shape == (2,) else (0, 0)
    right = bits in BITS and words.dtype == np.int32 and len(words.shape) == 2 and words.shape[0] == O
    if not right or not fits(words, bits, 1, I):
        expected = f"int32 [O, I * {bits} / 32] where weight_shape, [{O}, {I}], is [O, I]"
        raise misfit(f"{module}.weight_packed", words, f"{module}.weight_scale", scales, expected)
    size, cells = _cells(module, words, (O, I), scales, scheme)
    half = 1 << (bits - 1)
    zeros = None
    if not scheme.get("symmetric", True):
        zeros = _zeros(module, needed(module, parts, "weight_zero_point")[0], bits, cells, half)
    listed = parts.get("weight_g_idx")
    if listed is not None and not a_list(listed, I):
        raise misfit(f"{module}.weight_packed", words, f"{module}.weight_g_idx", listed, f"{I} whole numbers")
    return Grid(whole(Packed(words, bits, 1, I), half), Factors(scales, cells), size, zeros, listed)


def _zeros(module: str, stored: Stored, bits: int, cells: tuple[int, int], half: int) -> Numbers:
    """Packed along the outputs; int8 as older versions wrote them."""
    if stored.dtype != np.int32:
        return _plain_zeros(module, stored, cells)
    if len(stored.shape) != 2 or stored.shape[1] != cells[1] or not fits(stored, bits, 0, cells[0]):
        expected = f"one of {bits} bits for each of {list(cells)} groups, packed along the first dimension"
        raise misfit(f"{module}.weight_zero_point", stored, "they", stored, expected)
    return whole(Packed(stored, bits, 0, cells[0]), half)


def _plain_zeros(module: str, stored: Stored, cells: tuple[int, int]) -> Numbers:
    if stored.dtype.itemsize != 1 or int(np.prod(stored.shape)) != int(np.prod(cells)):
        expected = f"one of 8 bits for each of {list(cells)} groups"
        raise misfit(f"{module}.weight_zero_point", stored, "they", stored, expected)
    return floats(stored.laid(cells))


def _fp4(module: str, parts: Mapping[str, Stored], scheme: Mapping[str, Any]) -> Grid:
    """NVFP4, whose 8-bit scales are divided by a common number, and MXFP4, whose scales are exponents."""
    packed, scales = needed(module, parts, "weight_packed", "weight_scale")
    only({"quant_method": "compressed-tensors", **scheme}, "symmetric", True)
    nested = scheme.get("strategy") == "tensor_group" or "weight_global_scale" in parts
    common = needed(module, parts, "weight_global_scale")[0] if nested else None
    if len(packed.shape) != 2 or (common is not None and not one(common.shape)):
        expected = "uint8 [O, I / 2], a scale for each group, and at most one weight_global_scale"
        raise misfit(f"{module}.weight_packed", packed, f"{module}.weight_scale", scales, expected)
    numbers = fp4(packed)
    size, cells = _cells(module, packed, numbers.codes.shape, scales, scheme)
    return Grid(numbers, Factors(scales, cells, common, divided=True), size)


def _cells(
    module: str, numbers: Stored, shape: tuple[int, int], scales: Stored, scheme: Mapping[str, Any]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows and columns that share a scale, how many of such cells there are)."""
    O, I = shape
    group, cell = scheme.get("group_size"), block(scheme)
    strategy = scheme.get("strategy") or ("group" if group and group > 0 else "block" if cell else "channel")
    sizes = {"tensor": (O, I), "channel": (1, I), "group": (1, group), "tensor_group": (1, group), "block": cell}
    size = sizes.get(str(strategy))
    whole_numbers = isinstance(size, (tuple, list)) and len(size) == 2 and all(type(n) is int for n in size)
    if not whole_numbers or min(size) < 1:
        raise ShardlmError(
            f"{numbers.file}: {module} is quantised with strategy={strategy!r}, group_size={group!r} and "
            f"block_structure={cell!r}; supported are {', '.join(sizes)} with their sizes. Open another quantisation"
        )
    cells = -(-O // size[0]), -(-I // size[1])
    if int(np.prod(scales.shape)) != cells[0] * cells[1]:
        expected = f"{list(cells)} scales, by strategy={strategy!r}"
        raise misfit(f"{module}.weight", numbers, f"{module}.weight_scale", scales, expected)
    return tuple(size), cells
