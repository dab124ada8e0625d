"""Writes tests/hf/seeing/NAME/: tiny random checkpoints that see too, saved by transformers, and the logits that it
computes with them of text alone. Needs torch and transformers:

    python tests/hf/make_seeing_references.py FOLDER [NAME ...]
"""

import os
import pathlib
import sys

import torch
import transformers
from make_references import LENGTH, ROWS, saved
from newest_cases import MISTRAL_LARGE4
from reference_parts import DENSE_MLA, GEMMA4, HYBRID, MOE, SIZES, STEP, STEP_VISION, YARN
from safetensors.torch import save_file

TEXT = {**SIZES, "num_hidden_layers": 2, "head_dim": 12}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 2, 1]}
QWEN2 = {**SIZES, "num_hidden_layers": 2, "rope_parameters": {**SECTIONS, "mrope_section": [2, 1, 1]}}
EXPERTS = {**MOE, "moe_intermediate_size": 24}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 2, "out_hidden_size": 32}
QWEN3 = {**QWEN, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 4,
    "patch_size": 2,
}
QWEN5 = {**QWEN, "num_position_embeddings": 4}
LINEAR = {**SIZES, **HYBRID}
LINEAR["rope_parameters"] = {**SECTIONS, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
GROWING = {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}, "model_type": "ministral3"}
OWN_INPUTS = {**GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
# name -> (options of the text, of what sees, of both)
CASES = {
    "exaone4_5": (
        {**TEXT, "model_type": "exaone4", "sliding_window": 6, "sliding_window_pattern": 2},
        {**QWEN, "num_key_value_heads": 2, "fullatt_block_indexes": [0]},
        {"tie_word_embeddings": False},
    ),
    "gemma3": ({**TEXT, "sliding_window": 6}, {**TOWER, "vision_use_head": False}, {"mm_tokens_per_image": 1}),
    "gemma4": (
        {**TEXT, **OWN_INPUTS},
        {**TOWER, "pooling_kernel_size": 1, "position_embedding_size": 4},
        {"audio_config": None},
    ),
    "gemma4_unified": (
        {**TEXT, **GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 8, "mm_posemb_size": 4, "output_proj_dims": 8},
        {"audio_config": {"audio_embed_dim": 4}},
    ),
    "kimi_k25": (
        {**SIZES, **DENSE_MLA, "num_hidden_layers": 2, "first_k_dense_replace": 2, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
        {"patch_size": 2, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"pos_emb_height": 2, "pos_emb_width": 2},
        {"tie_word_embeddings": False},
    ),
    "llama4": (
        {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 7},
        {**TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {"tie_word_embeddings": False},
    ),
    "mistral3": ({**TEXT, **GROWING}, TOWER, {"tie_word_embeddings": False}),
    "mistral_large4": (
        {**MISTRAL_LARGE4, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "kv_source_layers": [0, 1]}
        | {"indexer_types": ["full", "full"], "index_topk": 64},
        {**TOWER, "model_type": "pixtral"},
        {"tie_word_embeddings": False},
    ),
    "qwen2_vl": (QWEN2, {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2}, {}),
    "qwen2_5_vl": (QWEN2, {**QWEN, "fullatt_block_indexes": [0]}, {"tie_word_embeddings": True}),
    "qwen3_5": (LINEAR, QWEN5, {}),
    "qwen3_5_moe": ({**LINEAR, "num_experts": 4, **OF_EXPERTS}, QWEN5, {}),
    "step3p7": (STEP, STEP_VISION, {}),
    "qwen3_vl": ({**TEXT, "rope_parameters": SECTIONS}, QWEN3, {}),
    "qwen3_vl_moe": ({**TEXT, **EXPERTS, "rope_parameters": SECTIONS}, QWEN3, {}),
}


def make(name: str, folder: pathlib.Path) -> None:
    torch.manual_seed(sum(map(ord, name)) + int(os.environ.get("SHARDLM_REFERENCE_SEED", "0")))
    text, vision, both = CASES[name]
    config = transformers.CONFIG_MAPPING[name](text_config=text, vision_config=vision, **both)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    with torch.no_grad():  # as in make_references.py
        for weight in model.parameters():
            centre, spread = (weight, 0.2) if weight.ndim == 1 else (0.0, weight.shape[-1] ** -0.5)
            weight.copy_((centre + torch.randn_like(weight) * spread).bfloat16())
    saved(model, folder)
    tokens = torch.randint(3, config.text_config.vocab_size, (ROWS, LENGTH))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    found = {"tokens": tokens.int(), "logits": logits}
    save_file(found, str(folder / "expected.safetensors.reference"))


if __name__ == "__main__":
    out = pathlib.Path(sys.argv[1])
    for name in sys.argv[2:] or CASES:
        make(name, out / name)
        print(name)
