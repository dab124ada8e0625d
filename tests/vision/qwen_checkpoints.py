"""Small random checkpoints of families with Qwen's encoders, and what transformers is given of images."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from seeing import functions_of, written
from served import drawn, with_tokenizer

from shardlm.vision.images import CLIP_MEAN, CLIP_STD

IMAGE, VIDEO = 90, 91
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MROPE = {"rope_theta": 10_000.0, "rope_type": "default", "mrope_section": [1, 1, 2]}
OF_ALL = {"depth": 4, "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
OF_3 = OF_ALL | {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 32, "num_position_embeddings": 36}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
# Blocks of three tokens, of which a query chooses two, by heads enough that no two have a score of 0; and in the first
# layer what is looked up of n-grams.
OF_4 = {"hc_count": 2, "hc_lowrank": 6, "ple_layer_ids": [1], "ple_embed_dim": 16, "ple_conv_kernel_size": 3}
OF_4 |= {"heads_per_ngram": 2, "ngram_vocab_size_base": 40, "make_ngram_vocab_size_divisible_by": 8}
OF_4 |= {"split_ngram_parts": 3, "indexer_n_heads": 12, "indexer_kv_heads": 1, "indexer_head_dim": 8}
OF_4 |= {"indexer_budget": 6, "indexer_compress_ratio": 3, "seed": 14, "eos_token_id": 94}
HEARS = {"num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "d_model": 8}
HEARS |= {"output_dim": 32, "max_source_positions": 20}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OF_2_5 = {"hidden_size": 48, "intermediate_size": 56, "out_hidden_size": 32, "window_size": 16}
OF_2_5 |= OF_ALL | {"fullatt_block_indexes": [1, 3]}
# model_type -> (class of its configuration, options of the text beside TEXT, vision_config)
FAMILIES = {
    "qwen2_vl": ("Qwen2VL", {}, OF_ALL | {"embed_dim": 48, "mlp_ratio": 2, "hidden_size": 32}),
    "qwen2_5_vl": ("Qwen2_5_VL", {}, OF_2_5),
    "exaone4_5": (
        "Exaone4_5_",
        {"model_type": "exaone4", "head_dim": 8, "sliding_window": 16, "sliding_window_pattern": 2},
        OF_2_5 | {"num_heads": 6, "num_key_value_heads": 2},
    ),
    "qwen3_vl": ("Qwen3VL", {"head_dim": 8}, OF_3 | {"deepstack_visual_indexes": [0, 2]}),
    "qwen3_vl_moe": ("Qwen3VLMoe", {"head_dim": 8, **EXPERTS}, OF_3 | {"deepstack_visual_indexes": [1]}),
    "qwen3_5": ("Qwen3_5", {"head_dim": 8, **LINEAR}, OF_3),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {"head_dim": 8, "shared_expert_intermediate_size": 16, **LINEAR, **EXPERTS},
        OF_3,
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        {"head_dim": 8, "shared_expert_intermediate_size": 16, **LINEAR, **EXPERTS, **OF_4},
        OF_3 | {"depth": 2, "hidden_size": 24, "intermediate_size": 40},
    ),
    "qwen2_5_omni_thinker": ("Qwen2_5OmniThinker", {}, OF_2_5),
    "qwen3_omni_moe_thinker": (
        "Qwen3OmniMoeThinker",
        {"head_dim": 8, **EXPERTS},
        OF_3 | {"deepstack_visual_indexes": [0, 2]},
    ),
}
# Of videos: of a frame, or (Qwen3) of all.
FILMED = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
FILMED |= {"size": {"shortest_edge": 256, "longest_edge": 2048}}
FILMED_3 = FILMED | {"size": {"shortest_edge": 512, "longest_edge": 8192}, "fps": 2}
FILMED_3 |= {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
SPECIAL = {"<|image_pad|>": IMAGE, "<|endoftext|>": 94}
SPECIAL |= {"<|video_pad|>": VIDEO, "<|vision_start|>": 92, "<|vision_end|>": 93}
PREPARATION = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}


def folder_of(kind: str, path: pathlib.Path):
    """Writes one; returns (path, transformers' model)."""
    torch, transformers = (
        pytest.importorskip("torch", reason="what transformers made is in references/"),
        pytest.importorskip("transformers", reason="what transformers made is in references/"),
    )
    name, own, vision = FAMILIES[kind]
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
    if "thinker" in kind:
        ids |= {"audio_token_id": 89, "audio_config": HEARS | ({"n_window": 4} if "3" in kind else {})}
    rope = dict(MROPE) if kind != "exaone4_5" else {"rope_theta": 10_000.0, "rope_type": "default"}
    text = {**TEXT, **own, "rope_parameters": rope}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=dict(vision), **ids)
    model = drawn(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    filmed = FILMED_3 if "num_position_embeddings" in vision else FILMED
    written(model, path, {}, preprocessor_config=PREPARATION, video_preprocessor_config=filmed)
    with_tokenizer(path, TEXT["vocab_size"], SPECIAL)
    return path, model


def inputs(
    images: Sequence[np.ndarray], ids: Sequence[int], films: Sequence[tuple[np.ndarray, float]] = ()
) -> dict[str, Any]:
    """What transformers' model is called with beside the tokens. `films`: frames of a size that is not changed, and how
    many a second."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if not images and not films:
        return {}
    found = {}
    if images:
        process = Qwen2VLImageProcessorPil(**PREPARATION)
        found |= process(list(images), input_data_format="channels_last", return_tensors="pt")
    if films:
        values, grids = zip(*(patchified(frames, 4, 2, 2) for frames, _ in films), strict=True)
        found |= {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.tensor(grids)}
        found["second_per_grid_ts"] = torch.tensor([2 / rate for _, rate in films])
    ids = torch.tensor([list(ids)])
    # Of a reply that names a token of images, where there are none, it is words.
    kinds = bool(images) * (ids == IMAGE).int() + 2 * bool(films) * (ids == VIDEO).int()
    return {**found, "mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids).int()}


def patchified(
    frames: Sequence[np.ndarray], patch: int, merge: int, together: int, mean=CLIP_MEAN, std=CLIP_STD
) -> tuple[Any, list[int]]:
    """(pixel_values_videos, [t, h, w]) of frames that have their size, as the processors' `patchify` makes them."""
    import torch

    [patchify] = functions_of("qwen2_vl/video_processing_qwen2_vl.py", "patchify")
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(a)[:, None, None] for a in (mean, std))
    values, *grid = patchify(None, ((pixels - mean) / std)[None], patch, merge, together)
    return values[0], grid
