"""config.json of further families in the form that checkpoints are published in, most of it left to the defaults of
transformers. As test_published_sights.CASES: (config, special tokens, what prepares images, layers of the text, vectors
of an image of 500 x 300, layers that see)."""

SIGLIP = {
    "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
LLAVA_NEXT = {  # llava-hf/llava-v1.6-mistral-7b-hf
    "model_type": "llava_next", "ignore_index": -100, "image_token_index": 32000, "projector_hidden_act": "gelu",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "tie_word_embeddings": False, "use_image_newline_parameter": True, "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vocab_size": 32064,
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32064,
    },
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
}  # fmt: skip
GRANITE = {  # ibm-granite/granite-vision-3.2-2b
    "model_type": "llava_next", "image_token_index": 49155, "vision_feature_layer": [-24, -20, -12, -1],
    "vision_feature_select_strategy": "full", "tie_word_embeddings": True,
    "image_grid_pinpoints": [[384, 768], [384, 1152], [768, 384], [768, 768], [1152, 384], [3840, 384]],
    "text_config": {
        "model_type": "granite", "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_size": 2048,
        "intermediate_size": 8192, "logits_scaling": 8.0, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-5,
        "rope_theta": 300000, "tie_word_embeddings": True, "vocab_size": 49156, "hidden_act": "silu",
    },
    "vision_config": SIGLIP | {"num_hidden_layers": 27},
}  # fmt: skip
ONEVISION = {  # llava-hf/llava-onevision-qwen2-0.5b-ov-hf
    "model_type": "llava_onevision", "image_token_index": 151646, "video_token_index": 151647,
    "projector_hidden_act": "gelu", "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full", "tie_word_embeddings": True, "use_image_newline_parameter": True,
    "text_config": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rope_theta": 1e6, "tie_word_embeddings": True, "vocab_size": 152000,
    },
    "vision_config": SIGLIP,
}  # fmt: skip
COHERE2 = {  # CohereLabs/command-a-vision-07-2025
    "model_type": "cohere2_vision", "alignment_intermediate_size": 36864, "downsample_factor": 2,
    "image_token_id": 255036,
    "text_config": {
        "model_type": "cohere2", "hidden_size": 12288, "intermediate_size": 36864, "num_hidden_layers": 64,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "logit_scale": 0.25,
        "max_position_embeddings": 131072, "rope_theta": 50000.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "layer_norm_eps": 1e-5, "vocab_size": 256000, "hidden_act": "silu",
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 512, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 16, "vision_use_head": False,
    },
}  # fmt: skip
LFM2 = {  # LiquidAI/LFM2-VL-1.6B
    "model_type": "lfm2_vl", "downsample_factor": 2, "do_image_splitting": True, "encoder_patch_size": 16,
    "image_token_index": 396, "image_token_id": 396, "max_image_tokens": 256, "max_tiles": 10, "min_tiles": 2,
    "projector_bias": True, "projector_hidden_act": "gelu", "projector_hidden_size": 2560, "tile_size": 512,
    "text_config": {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
        "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "rope_theta": 1e6, "vocab_size": 65536,
    },
    "vision_config": {
        "model_type": "siglip2_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_patches": 256,
        "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 16, "vision_use_head": False,
    },
    "vision_feature_layer": -1,
}  # fmt: skip
GLM_EYES = {
    "attention_bias": False, "depth": 24, "hidden_act": "silu", "hidden_dropout_prob": 0.0, "hidden_size": 1536,
    "image_size": 336, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 13696, "num_heads": 12,
    "out_hidden_size": 4096, "patch_size": 14, "rms_norm_eps": 1e-5, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
GLM4V = {  # zai-org/GLM-4.1V-9B-Thinking
    "model_type": "glm4v", "image_token_id": 151343, "image_start_token_id": 151339, "video_token_id": 151344,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_text", "attention_bias": True, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 13696, "max_position_embeddings": 65536, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "rope_theta": 10000.0,
        "vocab_size": 151552, "eos_token_id": [151329, 151336],
    },
    "vision_config": GLM_EYES | {"model_type": "glm4v_vision"},
}  # fmt: skip
GLM45V = {  # zai-org/GLM-4.5V
    "model_type": "glm4v_moe", "image_token_id": 151363, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "glm4v_moe_text", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 65536,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "vision_config": GLM_EYES | {"model_type": "glm4v_moe_vision", "intermediate_size": 10944},
}  # fmt: skip
PADDLE = {  # PaddlePaddle/PaddleOCR-VL
    "model_type": "paddleocr_vl", "compression_ratio": 1.0, "head_dim": 128, "hidden_act": "silu",
    "hidden_dropout_prob": 0.0, "hidden_size": 1024, "ignored_index": -100, "image_token_id": 100295,
    "intermediate_size": 3072, "max_position_embeddings": 131072, "num_attention_heads": 16, "num_hidden_layers": 18,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_is_neox_style": True, "rope_theta": 500000,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "tie_word_embeddings": False, "use_3d_rope": True, "use_bias": False, "video_token_id": 101307,
    "vision_start_token_id": 101305, "vocab_size": 103424, "weight_share_add_bias": True,
    "vision_config": {
        "architectures": ["PaddleOCRVisionModel"], "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "image_size": 384, "intermediate_size": 4304, "model_type": "paddleocr_vl", "num_attention_heads": 16,
        "num_channels": 3, "num_hidden_layers": 27, "patch_size": 14, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "tokens_per_second": 2,
    },
}  # fmt: skip
LIGHTON = {  # lightonai/LightOnOCR-1B-1025
    "model_type": "lighton_ocr", "image_token_id": 151655, "spatial_merge_size": 2,
    "text_config": {
        "model_type": "qwen3", "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "sliding_window": None,
        "vocab_size": 151936,
    },
    "vision_config": {
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096,
        "model_type": "pixtral", "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
OF_LFM2 = {f"<|img_row_{r}_col_{c}|>": 10 * r + c for r in range(1, 11) for c in range(1, 11) if r * c <= 10}
OF_LFM2 |= {"<|image_start|>": 120, "<|image_end|>": 121, "<|img_thumbnail|>": 122}
OF_COHERE = {"<|START_OF_IMG|>": 120, "<|END_OF_IMG|>": 121, "<|IMG_LINE_BREAK|>": 122}
SQUARE = {"height": 384, "width": 384}
MANY = {"size": {"longest_edge": 9633792, "shortest_edge": 12544}, "patch_size": 14, "merge_size": 2}
CASES = {
    "llava_next": (
        LLAVA_NEXT, {}, {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        32, 576 + 24 * 41, 23,
    ),
    "granite_vision": (GRANITE, {}, {"size": SQUARE, "crop_size": SQUARE}, 40, 729 + 27 * 47, 27),
    "llava_onevision": (ONEVISION, {}, {"size": SQUARE}, 24, 729 + 27 * 47, 26),
    "cohere2_vision": (COHERE2, OF_COHERE, {"size": {"height": 512, "width": 512}}, 64, 256, 27),
    "lfm2_vl": (LFM2, OF_LFM2, {"tile_size": 512, "use_thumbnail": True, "resample": 2}, 16, 9 * 16, 26),
    "glm4v": (GLM4V, {}, MANY, 40, 11 * 18, 24),
    "glm4v_moe": (GLM45V, {}, MANY, 46, 11 * 18, 24),
    "paddleocr_vl": (
        PADDLE, {}, {"min_pixels": 147384, "max_pixels": 2822400, "patch_size": 14, "temporal_patch_size": 1},
        18, 11 * 18, 27,
    ),
    "lighton_ocr": (LIGHTON, {}, {"size": {"longest_edge": 1540}, "patch_size": 14}, 28, 11 * 18, 24),
}  # fmt: skip
