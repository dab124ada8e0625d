"""Of which types the options of an engine are (build.EngineConfig), looked at before anything is read: an option of
another type would end in a traceback minutes later, or mean what nobody meant ("false" is true). No jax."""

import math
import numbers
import os
from collections.abc import Mapping
from typing import Any, Literal

from shardlm.errors import ShardlmError

Fused = Literal["auto", "on", "off"]
"""Whether projections of few tokens are kernels of ours (try_out.py)."""
_COUNTS = ("max_model_len", "block_size", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens", "decode_steps")
_COUNTS += ("max_loras", "max_lora_rank", "decode_context_parallel_size")
_TEXTS = ("dtype", "quantization", "kv_cache_dtype", "prefill_attention", "fused_products")
_SWITCHES = ("enable_prefix_caching", "deterministic", "enable_lora")
_OPTIONAL = {"dtype", "quantization", "max_model_len", "kv_cache_bytes", "max_num_seqs", "max_num_batched_tokens"}
_OPTIONAL |= {"max_lora_rank", "block_size"}  # None is their default
LARGEST = 2**31 - 1  # what an integer on the device holds


def check_limits(limits: Any) -> None:
    """Raises ShardlmError where limit_mm_per_prompt is no mapping of "image" and "video" to counts."""
    if limits is None:
        return
    fits = isinstance(limits, Mapping) and all(is_integer(n) and n >= 0 for n in limits.values())
    if not fits or set(limits) - {"image", "video", "audio"} or limits.get("audio"):
        raise ShardlmError(
            f'limit_mm_per_prompt={limits!r}; give {{"image": n, "video": n}} with n of at least 0: images and videos '
            "are read"
        )
    if limits.get("image") == 0 and limits.get("video"):
        raise ShardlmError(
            f"limit_mm_per_prompt={limits!r}: without images a model's text is served alone, and videos are read by "
            "the encoder of images; allow one image"
        )


def check_types(config: Any) -> None:
    """Raises ShardlmError for the first option of an EngineConfig of a wrong type, or for a count that no device has
    room for."""
    for name in _COUNTS:
        if (value := getattr(config, name)) is None and name in _OPTIONAL:
            continue
        if not is_integer(value) or value < 1:
            raise ShardlmError(f"{name}={value!r} must be an integer of at least 1")
        if value > LARGEST and name != "kv_cache_bytes":
            raise ShardlmError(f"{name}={value} must be at most {LARGEST}")
    for name in _TEXTS:
        value = getattr(config, name)
        if not (isinstance(value, str) and value) and not (value is None and name in _OPTIONAL):
            raise ShardlmError(f"{name}={value!r} must be a text")
    for name in _SWITCHES:
        if not isinstance(value := getattr(config, name), bool):
            raise ShardlmError(f"{name}={value!r} must be True or False")
    share = config.gpu_memory_utilization
    if not isinstance(share, numbers.Real) or isinstance(share, bool):
        raise ShardlmError(f"gpu_memory_utilization={share!r} must be a number")
    size = config.kv_offloading_size
    real = isinstance(size, numbers.Real) and not isinstance(size, bool)
    if size is not None and not (real and 0 < size < math.inf):
        raise ShardlmError(f"kv_offloading_size={size!r} must be a number of GiB above 0")
    check_limits(config.limit_mm_per_prompt)
    if not isinstance(config.mm_processor_kwargs, Mapping | None):
        raise ShardlmError(f'mm_processor_kwargs={config.mm_processor_kwargs!r} must be a mapping, {{"max_pixels": n}}')
    modules = config.lora_modules
    if not isinstance(modules, Mapping) or not all(
        isinstance(name, str) and name and is_path(path) for name, path in modules.items()
    ):
        raise ShardlmError(f"lora_modules={modules!r} must be a mapping of names to folders, {{NAME: FOLDER}}")


def check_model(model: Any) -> None:
    """Raises ShardlmError for what is neither a folder nor a name."""
    if not is_path(model):
        raise ShardlmError(f"model={model!r} must be a folder, a name on the hub or a run")


def check_seed(seed: Any) -> None:
    """Raises ShardlmError for what is neither an integer nor None."""
    if seed is not None and not is_integer(seed):
        raise ShardlmError(f"seed={seed!r} must be an integer, or None for other replies in each run")


def is_integer(value: Any) -> bool:
    """Of Python or numpy; True is none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike) and bool(os.fspath(value))
