"""Flags of the launchers that run the serving engine: its mesh, sizes, precisions and drafts. Imports no jax."""

import json
from typing import Any

from absl import flags

from shardlm.errors import ShardlmError

AXES = {
    "tensor": "Devices to split heads, MLPs and vocabulary over.",
    "expert": "Devices to split experts over.",
    "pipeline": "Stages to split the layers into.",
    "data": "Replicas, each on devices of its own.",
}
_SIZES = {
    axis: flags.DEFINE_integer(axis, None, f"{meaning} By default 1, or the configuration's.", lower_bound=1)
    for axis, meaning in AXES.items()
}
_DTYPE = flags.DEFINE_string("dtype", None, "That is computed in; by default the checkpoint's, on a CPU float32.")
_QUANTIZATION = flags.DEFINE_enum(
    "quantization",
    None,
    ["checkpoint", "dtype", "fp8", "int8", "int4", "fp8_dynamic", "int8_dynamic"],
    "Of weights; checkpoint: in few bits as its file has them, the default of such; dtype: none; dynamic: activations "
    "too, for each token, and 8-bit numbers are multiplied.",
)
_KV_CACHE = flags.DEFINE_enum(
    "kv_cache_dtype",
    "auto",
    ["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"],
    "Of keys and values that are kept; auto: dtype; fp8 and fp8_e4m3 are the same.",
)
_SPLIT_PAGES = flags.DEFINE_integer(
    "decode_context_parallel_size",
    None,
    "Devices over which the positions of each page are split, of those that would each have a copy of it; by default "
    "1, in plans what serves more.",
    lower_bound=1,
)
_MAX_MODEL_LEN = flags.DEFINE_integer("max_model_len", None, "Tokens of prompt and reply together.", lower_bound=1)
_BLOCK_SIZE = flags.DEFINE_integer("block_size", None, "Tokens of a page; by default 16, on a CPU 64.", lower_bound=1)
_MEMORY = flags.DEFINE_float("gpu_memory_utilization", 0.9, "Share of a GPU's memory that is used.")
_CACHE_GIB = flags.DEFINE_float("kv_cache_gib", None, "Of all pages; by default what is left, on a CPU 1.", 1e-6)
_MAX_SEQS = flags.DEFINE_integer("max_num_seqs", None, "Requests at once; by default 256, on a CPU 32.", lower_bound=1)
_MAX_TOKENS = flags.DEFINE_integer("max_num_batched_tokens", None, "Of prompts in a step; 2048, on a CPU 512.")
_PREFIX = flags.DEFINE_bool("enable_prefix_caching", True, "Equal beginnings of prompts are computed once.")
_OFFLOADED = flags.DEFINE_float(
    "kv_offloading_size", None, "GiB of the host's memory for pages that the prefix cache has no room for."
)
_PREFILL = flags.DEFINE_enum(
    "prefill_attention",
    "auto",
    ["auto", "whole", "pages"],
    "Of chunks of many tokens; auto: cuDNN where it can; whole: of these only those that begin a prompt.",
)
_FUSED = flags.DEFINE_enum(
    "fused_products",
    "auto",
    ["auto", "on", "off"],
    "Projections of few tokens by kernels of ours, with norm and gate; auto: where the GPU is seen to be quicker so.",
)
_DETERMINISTIC = flags.DEFINE_bool("deterministic", False, "A reply is the same bits whatever else runs; slower.")
_SPECULATIVE = flags.DEFINE_string(
    "speculative_config",
    None,
    "JSON of drafts to verify: {method: ngram, draft_model, mtp or eagle3, num_speculative_tokens, ...}.",
)
_LIMITS = flags.DEFINE_string(
    "limit_mm_per_prompt",
    None,
    'Images and videos that a prompt may have, {"image": N, "video": N} or image=N; by default as many as there is '
    "room for; image=0: texts alone.",
)
_PREPARED = flags.DEFINE_string(
    "mm_processor_kwargs",
    None,
    'How images are prepared otherwise than preprocessor_config.json says, {"max_pixels": N}, and videos: {"fps": N}.',
)
_ENABLE_LORA = flags.DEFINE_bool("enable_lora", False, "Room for adapters beside the weights, which come later.")
_MAX_LORAS = flags.DEFINE_integer("max_loras", 1, "Adapters at once, at least those that are given.", lower_bound=1)
_MAX_LORA_RANK = flags.DEFINE_integer(
    "max_lora_rank", None, "Of each; by default the largest of those that are given, at least 16.", lower_bound=1
)


def mesh_sizes(otherwise: dict[str, int] | None = None) -> dict[str, int]:
    """Of the mesh's axes that serving has; `otherwise`: of those that the command line does not give."""
    return {axis: flag.value or (otherwise or {}).get(axis, 1) for axis, flag in _SIZES.items()}


def fixed_axes() -> dict[str, int]:
    """Of the mesh's axes, what the command line gives."""
    return {axis: flag.value for axis, flag in _SIZES.items() if flag.value}


def splits_pages() -> bool:
    """Whether the command line leaves open how pages are split."""
    return _SPLIT_PAGES.value is None


def refuse_given(what: str, *more: flags.FlagHolder) -> None:
    """Raises ShardlmError where flags of an engine, or `more` of what has one, are given to what has none."""
    own = flags.FLAGS.flags_by_module_dict()[__name__]
    if found := [flag.name for flag in (*own, *more) if flag.present]:
        raise ShardlmError(f"--{found[0]} is of an engine in this process, and {what} heeds it not: leave it out")


def engine_options() -> dict[str, Any]:
    """Fields of EngineConfig but the mesh. Raises ShardlmError for what cannot be."""
    from shardlm.serve.speculation.config import SpeculativeConfig

    return {
        "dtype": _DTYPE.value,
        "quantization": _QUANTIZATION.value,
        "kv_cache_dtype": _KV_CACHE.value,
        "decode_context_parallel_size": _SPLIT_PAGES.value or 1,
        "max_model_len": _MAX_MODEL_LEN.value,
        "block_size": _BLOCK_SIZE.value,
        "gpu_memory_utilization": _MEMORY.value,
        "kv_cache_bytes": int(_CACHE_GIB.value * 2**30) if _CACHE_GIB.value else None,
        "max_num_seqs": _MAX_SEQS.value,
        "max_num_batched_tokens": _MAX_TOKENS.value,
        "enable_prefix_caching": _PREFIX.value,
        "kv_offloading_size": _OFFLOADED.value,
        "prefill_attention": _PREFILL.value,
        "fused_products": _FUSED.value,
        "deterministic": _DETERMINISTIC.value,
        "limit_mm_per_prompt": _limits(),
        "mm_processor_kwargs": _json(_PREPARED.value, "mm_processor_kwargs") if _PREPARED.value else None,
        "enable_lora": _ENABLE_LORA.value,
        "max_loras": _MAX_LORAS.value,
        "max_lora_rank": _MAX_LORA_RANK.value,
        "speculative_config": SpeculativeConfig.from_json(_SPECULATIVE.value) if _SPECULATIVE.value else None,
    }


def _json(given: str, name: str) -> Any:
    """Raises ShardlmError for what is no JSON."""
    try:
        return json.loads(given)
    except ValueError as error:
        raise ShardlmError(f"--{name}={given} is not JSON ({error})") from None


def _limits() -> dict[str, Any] | None:
    """Raises ShardlmError for what is neither JSON nor image=N."""
    given = _LIMITS.value
    if not given:
        return None
    name, _, count = given.partition("=")
    try:
        return {name.strip(): int(count)} if count else json.loads(given)
    except ValueError:
        raise ShardlmError(f'--limit_mm_per_prompt={given}: give {{"image": N}} or image=N') from None
