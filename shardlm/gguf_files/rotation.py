"""The rotary embedding that a GGUF file tells of, as config.json has it: `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardlm.errors import ShardlmError
from shardlm.gguf_files.header import Gguf
from shardlm.gguf_files.told import Told

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
# Of Llama 3.1 and later (their config.json); what differs between them is the factor.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotation(told: Told, gguf: Gguf, head_dim: int, theta: float = 10_000.0) -> dict[str, Any]:
    """`theta`: where the file has none. Raises ShardlmError for another kind of stretching."""
    base = told.number("rope.freq_base", theta)
    found: dict[str, Any] = {"rope_theta": base}
    turned = told.count("rope.dimension_count", head_dim)
    if turned != head_dim:
        found["partial_rotary_factor"] = turned / head_dim
    scaling = _scaling(told, gguf, base, turned)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _scaling(told: Told, gguf: Gguf, base: float, turned: int) -> dict[str, Any]:
    kind = told("rope.scaling.type", "none")
    factor = told.number("rope.scaling.factor", 0) or told.number("rope.scale_linear", 0)
    original = told.count("rope.scaling.original_context_length", 0)
    magnitude = told.number("rope.scaling.attn_factor", 0)
    if LONG in gguf.tensors or SHORT in gguf.tensors:
        length = told.count("context_length")
        return _long(gguf, original or length, length, magnitude)
    if magnitude not in (0, 1):
        raise told.refused("rope.scaling.attn_factor", f"supported is 1, or another one with {LONG}")
    if FREQUENCIES in gguf.tensors:
        return _by_frequency(_factors(gguf, FREQUENCIES), base, turned, told.count("context_length"))
    if kind == "yarn":
        return _yarn(told, factor, original)
    if kind not in ("none", "linear", "longrope"):
        raise told.refused("rope.scaling.type", "supported are none, linear, longrope and yarn")
    return {"rope_type": "linear", "factor": factor} if factor not in (0, 1) else {}


def _yarn(told: Told, factor: float, original: int) -> dict[str, Any]:
    options = {
        "attention_factor": told.number("rope.scaling.yarn_attn_factor", 0),
        "beta_fast": told.number("rope.scaling.yarn_beta_fast", 0),
        "beta_slow": told.number("rope.scaling.yarn_beta_slow", 0),
    }
    told.only("rope.scaling.yarn_ext_factor", 1.0)
    if not factor or not original:
        raise told.refused("rope.scaling.type", "it needs rope.scaling.factor and original_context_length")
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return found | {name: value for name, value in options.items() if value > 0}


def _long(gguf: Gguf, original: int, length: int, magnitude: float) -> dict[str, Any]:
    short, long = _factors(gguf, SHORT), _factors(gguf, LONG)
    found = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    found["original_max_position_embeddings"] = original
    stretched = max(1.0, length / original)
    usual = math.sqrt(1 + math.log(stretched) / math.log(original))
    return found | ({"attention_factor": magnitude} if magnitude and abs(magnitude - usual) > 1e-6 else {})


def _by_frequency(factors: list[float], base: float, turned: int, length: int) -> dict[str, Any]:
    """What each frequency is divided by: Llama 3's curve where it is that, else as it is, which is longrope with one
    list for all lengths."""
    if max(factors) == min(factors) == 1:
        return {}
    guess = {"rope_type": "llama3", "factor": max(factors), **LLAMA3}
    if np.allclose(factors, llama3(guess, base, turned), rtol=1e-4):
        return guess
    same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_type": "longrope", **same, "original_max_position_embeddings": length}


def llama3(options: Mapping[str, Any], base: float, turned: int) -> np.ndarray:
    """What Llama 3.1's stretching divides each frequency by (_compute_llama3_parameters in
    https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_rope_utils.py)."""
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    waves = 2 * np.pi * base ** (np.arange(0, turned, 2) / turned)
    turns = options["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _factors(gguf: Gguf, name: str) -> list[float]:
    if name not in gguf.tensors or gguf.tensors[name].kind != "F32":
        held = f"is {gguf.tensors[name].kind}" if name in gguf.tensors else "is not there"
        raise ShardlmError(f"the GGUF file's {name} {held}, and F32 is needed; download or convert it again")
    return [float(str(number)) for number in gguf.tensors[name].raw().reshape(-1).view("<f4")]
