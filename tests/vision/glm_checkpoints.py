"""Small random checkpoints of GLM's families that see, and what transformers is given of images."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from qwen_checkpoints import patchified
from seeing import lively, written
from served import drawn, with_tokenizer

IMAGE = 90
VIDEO, BEGIN, END = 91, 88, 89  # of a video, and around one
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": 92, "image_end_token_id": 93}
IDS |= {"video_start_token_id": BEGIN, "video_end_token_id": END}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 0, 1]},
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1]},
}
EYES = {"depth": 2, "num_heads": 2, "hidden_size": 24, "patch_size": 4, "image_size": 24, "out_hidden_size": 32}
EYES |= {"intermediate_size": 40}
GLM5 = pathlib.Path(__file__).parents[1] / "hf" / "references" / "glm5_next" / "config.json"
# model_type -> (class of its configuration, options of the text beside TEXT, vision_config)
FAMILIES = {
    "glm4v": ("Glm4v", {"head_dim": 8}, EYES),
    "glm4v_moe": ("Glm4vMoe", EXPERTS, EYES | {"attention_bias": True}),
    "glm46v": ("Glm46V", {"model_type": "glm4v_moe_text", **EXPERTS}, EYES | {"model_type": "glm4v_moe_vision"}),
    "glm_ocr": (
        "GlmOcr",
        {"head_dim": 12, "rope_parameters": TEXT["rope_parameters"] | {"mrope_section": [1, 1, 1]}},
        EYES,
    ),
    "glm5_next": ("Glm5Next", {}, EYES | {"swiglu_limit": 0.4, "projection_intermediate_size": 48}),
}
SPECIAL = {"<|image|>": IMAGE, "<|video|>": VIDEO, "<|begin_of_image|>": 92, "<|end_of_image|>": 93}
SPECIAL |= {"<|begin_of_video|>": BEGIN, "<|end_of_video|>": END, "<|endoftext|>": 94}
SIZE = {"shortest_edge": 512, "longest_edge": 8192}
PREPARATION = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": SIZE}


def made(kind: str):
    """transformers' model."""
    torch, transformers = (
        pytest.importorskip("torch", reason="what transformers made is in references/"),
        pytest.importorskip("transformers", reason="what transformers made is in references/"),
    )
    torch.manual_seed(0)
    name, own, vision = FAMILIES[kind]
    longer = {"max_position_embeddings": 256}
    text = json.loads(GLM5.read_text()) | longer if kind == "glm5_next" else TEXT | own
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=dict(vision), **IDS)
    return lively(getattr(transformers, f"{name}ForConditionalGeneration")(config).eval())


def folder_of(kind: str, path: pathlib.Path):
    """Writes one; returns (path, transformers' model)."""
    model = drawn(made(kind))
    written(model, path, {}, preprocessor_config=PREPARATION)
    with_tokenizer(path, TEXT["vocab_size"], SPECIAL)
    return path, model


def inputs(
    images: Sequence[np.ndarray], ids: Sequence[int], films: Sequence[tuple[np.ndarray, float]] = ()
) -> dict[str, Any]:
    """What transformers' model is called with beside the tokens, which are of images or of videos. `films`: frames of a
    size that is not changed, and how many a second."""
    import torch
    from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil

    if films:
        values, grids = zip(*(patchified(frames, 4, 2, 2) for frames, _ in films), strict=True)
        found = {"pixel_values_videos": torch.cat(values), "video_grid_thw": torch.tensor(grids)}
        return {**found, "mm_token_type_ids": 2 * (torch.tensor([list(ids)]) == IMAGE).int()}
    if not images:
        return {}
    found = Glm46VImageProcessorPil(**PREPARATION)(list(images), input_data_format="channels_last", return_tensors="pt")
    return {**found, "mm_token_type_ids": (torch.tensor([list(ids)]) == IMAGE).int()}
