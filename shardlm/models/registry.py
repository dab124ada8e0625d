"""The architectures that Hugging Face checkpoints are opened as, by the `model_type` of their config.json."""

import difflib
import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.hf_quantised import OPTIONS, supported
from shardlm.layers.block import BlockConfig
from shardlm.models.hf_options import Options
from shardlm.models.naming import Modules, Names
from shardlm.models.text_parts import SEEING, text_config
from shardlm.models.transformer_config import TransformerConfig

FAMILIES = {
    "llama": "llama",
    "arcee": "llama",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "llama4_text": "llama4",
    "mistral": "mistral",
    "ministral": "mistral",
    "ministral3": "mistral",
    "cwm": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek_sparse",
    "deepseek_v4": "deepseek_v4",
    "glm_moe_dsa": "glm_dsa",
    "kimi_k2": "deepseek",
    "glm4_moe_lite": "deepseek",
    "youtu": "deepseek",
    "sarvam_mla": "sarvam",
    "sarvam_moe": "sarvam",
    "mistral4": "mistral4",
    "mistral_large4_text": "mistral_large4",
    "gemma": "gemma",
    "gemma2": "gemma",
    "vaultgemma": "vaultgemma",
    "gemma3_text": "gemma",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "phi": "phi2",
    "phi3": "phi",
    "phimoe": "phimoe",
    "olmo": "olmo",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "olmoe": "olmo",
    "flex_olmo": "olmo",
    "smollm3": "smollm",
    "granite": "granite",
    "granitemoe": "granite",
    "granitemoeshared": "granite",
    "granitemoehybrid": "granite_hybrid",
    "granite_swa": "granite",
    "hyperclovax": "granite",
    "granitemoe_swa": "granite",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm_moe",
    "glm5_next_text": "glm5_next",
    "dots1": "glm_moe",
    "solar_open": "glm_moe",
    "exaone_moe": "exaone_moe",
    "minimax": "minimax_01",
    "minimax_text_01": "minimax_01",
    "minimax_m1": "minimax_01",
    "minimax_m2": "minimax",
    "minimax_m3_vl_text": "minimax_m3",
    "seed_oss": "seed",
    "exaone4": "exaone",
    "starcoder2": "starcoder",
    "cohere": "cohere",
    "cohere2": "cohere",
    "cohere2_moe": "cohere",
    "ernie4_5": "ernie",
    "ernie4_5_moe": "ernie",
    "hunyuan_v1_dense": "hunyuan",
    "hunyuan_v1_moe": "hunyuan",
    "hy_v3": "hunyuan",
    "hy_v4": "hy4",
    "nemotron": "nemotron",
    "bamba": "bamba",
    "falcon_h1": "falcon_h1",
    "flint": "flint",
    "longcat_flash": "longcat",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "lfm3": "lfm3",
    "nemotron_h": "nemotron_h",
    "afmoe": "afmoe",
    "apertus": "apertus",
    "helium": "helium",
    "kolibri1": "kolibri",
    "laguna": "laguna",
    "lara_mini": "lara",
    "mellum": "mellum",
    "muse_glimmer_text": "muse",
    "mimo_v2_flash": "mimo",
    "step3p5": "step",
    "nanochat": "nanochat",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neo": "gpt_neo",
    "gpt_neox": "gpt_neox",
    "gptj": "gptj",
    "opt": "opt",
    "stablelm": "stablelm",
    "falcon": "falcon",
    "bloom": "bloom",
    "mpt": "mpt",
    "persimmon": "persimmon",
    "dbrx": "dbrx",
    "minicpm3": "minicpm",
    "jais2": "jais2",
    "gpt_oss": "gpt_oss",
    "kimi_linear": "kimi_linear",
    "bailing_hybrid": "bailing",
    "olmo_hybrid": "olmo_hybrid",
    "qwen3_next": "qwen_next",
    "qwen3_5_text": "qwen_hybrid",
    "qwen3_5_moe_text": "qwen_hybrid",
    "qwen4_exp_text": "qwen4_exp",
}
DRAFTING = {"eagle3": "eagle"}  # heads that draft for other models, no models themselves: opened with those


def transformer(config: Mapping[str, Any], length: int = 0) -> TransformerConfig:
    """The decoder that a config.json describes. `length` is the longest row of this use, which decides the rotation of
    some kinds of stretched models; 0: the length they were first trained with.

    Raises ShardlmError for an unknown `model_type` and for an option that is not supported or not known.
    """
    options = Options(text_config(config))
    supported(config)
    options.asked.update(OPTIONS)
    found = _family(options("model_type", "")).from_hf(options, length)
    options.finish()
    return found


def names(config: Mapping[str, Any], shape: TransformerConfig, block: BlockConfig) -> Names:
    """Where each weight of the model, and of such a block, is in the checkpoint."""
    return _family(text_config(config)["model_type"]).names(shape, block)


def longest(config: Mapping[str, Any]) -> int:
    """Positions that a model is said to be made for, by the names that families have for them, or that all of a family
    are; 0: not said. Command R says 8,192 of its tables beside the 131,072 that it was made for."""
    text = text_config(config)
    names = ("model_max_length", "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    said = next(filter(None, (text.get(name) for name in names)), 0)
    return said or (getattr(_family(text["model_type"]), "LONGEST", 0) if text.get("model_type") in FAMILIES else 0)


def unused(config: Mapping[str, Any]) -> re.Pattern | None:
    """The names of tensors that published checkpoints have, as those of a language model alone, and no layer uses."""
    text = text_config(config)
    of_family = getattr(_family(text["model_type"]), "unused", None)
    return of_family(text) if of_family else None


def otherwise_written(config: Mapping[str, Any]) -> str:
    """What to tell of a checkpoint that does not fit, where transformers writes a family otherwise than it is
    published; empty: it does not."""
    return getattr(_family(text_config(config)["model_type"]), "OTHERWISE_WRITTEN", "")


def published_name(config: Mapping[str, Any]) -> Callable[[str], str] | None:
    """What gives tensors the names that they are published under, in families of which transformers writes others and
    whose names do not begin as most; None elsewhere."""
    return getattr(_family(text_config(config)["model_type"]), "published_name", None)


def module_name(config: Mapping[str, Any]) -> Callable[[str], str]:
    """What gives the module of a tensor its name in transformers, in which PEFT's files have it, where that is another
    than the published one."""
    return getattr(_family(text_config(config)["model_type"]), "module_name", lambda name: name)


def modules(config: Mapping[str, Any]) -> Modules | None:
    """Where modules that predict further tokens are, in families whose checkpoints have them under names of their own;
    None where they are layers after the last, or there are none."""
    family = FAMILIES.get(text_config(config).get("model_type", ""))
    return getattr(importlib.import_module(f"shardlm.models.{family}"), "MODULES", None) if family else None


def _family(model_type: str):
    if model_type not in FAMILIES | DRAFTING:
        known = [*FAMILIES, *SEEING]
        near = difflib.get_close_matches(model_type, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ShardlmError(
            f"config.json has model_type={json.dumps(model_type)}, an architecture that shardlm does not have; {hint}"
            f"it has {', '.join(known)}"
        )
    return importlib.import_module(f"shardlm.models.{(FAMILIES | DRAFTING)[model_type]}")
