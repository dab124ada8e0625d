"""Encoders of images that are measured: what the folders of published checkpoints say of them, each opened as such a
folder is, without its weights; and two that are as small as can be."""

import copy
import functools
import json
import pathlib
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from shardlm.vision.registry import sight_of
from shardlm.vision.sight import Sight

Files = Mapping[str, Mapping[str, Any]]
"""By name without its end: config, and what there is beside it."""

_LINES = {"added_tokens": [{"content": "\n" * many, "id": 106 + many} for many in (1, 2, 3, 4)]}
_ROWS = {"added_tokens": [{"content": "[IMG_BREAK]", "id": 12}, {"content": "[IMG_END]", "id": 13}]}
_QWEN_2_5: Files = {  # https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct
    "config": {
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "preprocessor_config": {
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
    },
}
_QWEN_3: Files = {  # https://huggingface.co/Qwen/Qwen3-VL-8B-Instruct
    "config": {
        "model_type": "qwen3_vl",
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "preprocessor_config": {
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    },
}
_GEMMA_3: Files = {  # https://huggingface.co/google/gemma-3-4b-it
    "config": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {"hidden_size": 2560, "model_type": "gemma3_text"},
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "preprocessor_config": {"size": {"height": 896, "width": 896}},
    "tokenizer": _LINES,
}
_MISTRAL_3: Files = {  # https://huggingface.co/mistralai/Mistral-Small-3.1-24B-Instruct-2503
    "config": {
        "model_type": "mistral3",
        "image_token_index": 10,
        "spatial_merge_size": 2,
        "text_config": {"hidden_size": 5120, "model_type": "mistral", "rms_norm_eps": 1e-5},
        "vision_config": {
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "image_size": 1540,
            "intermediate_size": 4096,
            "model_type": "pixtral",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "rope_theta": 10_000.0,
        },
    },
    "preprocessor_config": {"patch_size": {"height": 28, "width": 28}, "size": {"longest_edge": 1540}},
    "tokenizer": _ROWS,
}


def _small(files: Files, **changes: Any) -> Files:
    """The same family with another vision_config, on patches of 4 pixels."""
    found = copy.deepcopy(dict(files))
    found["config"]["vision_config"] |= {"hidden_size": 48, "intermediate_size": 56, "patch_size": 4, **changes}
    return found


_FEW = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}
_WINDOWS = {"depth": 4, "num_heads": 3, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1, 3]}
_DEEP = {"depth": 3, "num_heads": 3, "out_hidden_size": 32, "num_position_embeddings": 36}
ENCODERS: Mapping[str, Files] = MappingProxyType(
    {
        "Qwen2.5-VL 7B": _QWEN_2_5,
        "Qwen3-VL 8B": _QWEN_3,
        "Gemma 3": _GEMMA_3,
        "Mistral Small 3.1": _MISTRAL_3,
        "windows": {**_small(_QWEN_2_5, **_WINDOWS), "preprocessor_config": _FEW},
        "deep": {**_small(_QWEN_3, **_DEEP, deepstack_visual_indexes=[0, 2]), "preprocessor_config": _FEW},
    }
)


@functools.cache
def sight_named(name: str) -> Sight:
    """How a checkpoint with one of ENCODERS sees."""
    with tempfile.TemporaryDirectory() as folder:
        for file, content in ENCODERS[name].items():
            pathlib.Path(folder, f"{file}.json").write_text(json.dumps(content))
        return sight_of(pathlib.Path(folder), ENCODERS[name]["config"])
