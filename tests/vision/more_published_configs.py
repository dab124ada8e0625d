"""As published_configs.py, from memory."""

SIGLIP = {
    "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304, "model_type": "siglip_vision_model",
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
AYA = {  # CohereLabs/aya-vision-8b
    "model_type": "aya_vision", "adapter_layer_norm_eps": 1e-6, "alignment_intermediate_size": 28672,
    "downsample_factor": 2, "image_token_index": 255036, "max_splits_per_img": 12, "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "text_config": {
        "model_type": "cohere2", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "logit_scale": 0.25,
        "max_position_embeddings": 16384, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4,
        "layer_norm_eps": 1e-5, "vocab_size": 256000, "hidden_act": "silu",
    },
    "vision_config": SIGLIP,
}  # fmt: skip
PALIGEMMA2 = {  # google/paligemma2-3b-mix-224
    "model_type": "paligemma", "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "hidden_size": 2304,
    "image_token_index": 257152, "num_hidden_layers": 26, "projection_dim": 2304, "_vocab_size": 257152,
    "text_config": {
        "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "eos_token_id": [1, 107], "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "model_type": "gemma2", "num_hidden_layers": 26, "num_image_tokens": 256, "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 257216,
    },
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_image_tokens": 256, "num_positions": 256,
        "patch_size": 14, "projection_dim": 2304, "torch_dtype": "bfloat16", "vision_use_head": False,
    },
}  # fmt: skip
PALIGEMMA = {  # google/paligemma-3b-mix-224
    "model_type": "paligemma", "bos_token_id": 2, "eos_token_id": 1, "hidden_size": 2048, "ignore_index": -100,
    "image_token_index": 257152, "projection_dim": 2048, "vocab_size": 257216,
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_image_tokens": 256, "num_key_value_heads": 1, "vocab_size": 257216,
    },
    "vision_config": PALIGEMMA2["vision_config"] | {"projection_dim": 2048, "projector_hidden_act": "gelu_fast"},
}  # fmt: skip
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 16384, "model_type": "llama",
    "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "vocab_size": 102400,
}  # fmt: skip
JANUS = {  # deepseek-community/Janus-Pro-1B
    "model_type": "janus", "image_token_id": 100581, "text_config": LLAMA,
    "vision_config": {
        "attention_bias": True, "attention_dropout": 0.0, "depth": 2, "hidden_act": "gelu", "hidden_dropout_rate": 0.0,
        "hidden_size": 1024, "image_size": 384, "layer_norm_eps": 1e-6, "mlp_ratio": 4.0,
        "model_type": "janus_vision_model", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24,
        "num_image_tokens": 576, "patch_size": 16, "projection_dim": 2048, "projection_dropout": 0.0,
        "use_qk_norm": False,
    },
    "vq_config": {"model_type": "janus_vqgan", "embed_dim": 8, "num_embeddings": 16384},
}  # fmt: skip
DEEPSEEK = {  # deepseek-community/deepseek-vl-1.3b-chat
    "model_type": "deepseek_vl", "image_token_id": 100015, "text_config": LLAMA,
    "vision_config": {
        "hidden_size": 1024, "image_size": 384, "intermediate_size": 4096, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 16, "vision_use_head": False,
    },
}  # fmt: skip
OMNI = {  # Qwen/Qwen2.5-Omni-7B
    "model_type": "qwen2_5_omni", "enable_audio_output": True, "torch_dtype": "bfloat16",
    "talker_config": {"model_type": "qwen2_5_omni_talker"},
    "token2wav_config": {"model_type": "qwen2_5_omni_token2wav"},
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker", "audio_token_index": 151646, "image_token_index": 151655,
        "video_token_index": 151656, "position_id_per_seconds": 25, "ignore_index": -100, "init_std": 0.02,
        "text_config": {
            "hidden_act": "silu", "hidden_size": 3584, "init_std": 0.02, "intermediate_size": 18944,
            "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2_5_omni_text",
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 152064,
        },
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu",
            "hidden_size": 1280, "in_channels": 3, "in_chans": 3, "init_std": 0.02, "intermediate_size": 3420,
            "model_type": "qwen2_5_omni_vision_encoder", "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14,
            "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 25,
            "window_size": 112,
        },
    },
}  # fmt: skip
OMNI_3 = {  # Qwen/Qwen3-Omni-30B-A3B-Instruct
    "model_type": "qwen3_omni_moe", "dtype": "bfloat16", "talker_config": {}, "code2wav_config": {},
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker", "image_token_id": 151655, "video_token_id": 151656,
        "audio_token_id": 151675, "position_id_per_seconds": 13,
        "text_config": {
            "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 768, "max_position_embeddings": 65536, "mlp_only_layers": [],
            "model_type": "qwen3_omni_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "use_qk_norm": True,
            "rope_scaling": {
                "interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
                "type": "default",
            },
            "shared_expert_intermediate_size": 0, "sliding_window": None, "use_sliding_window": False,
            "vocab_size": 152064,
        },
        "vision_config": {
            "apply_vit_abs_pos_embed": True, "deepstack_visual_indexes": [8, 16, 24], "depth": 27,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 768, "in_channels": 3,
            "in_chans": 3, "intermediate_size": 4304, "model_type": "qwen3_omni_moe_vision_encoder", "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
            "spatial_patch_size": 16, "temporal_patch_size": 2, "tokens_per_second": 2,
        },
    },
}  # fmt: skip
OVIS2 = {  # thisisiron/Ovis2-2B-hf, with other numbers of tokens
    "model_type": "ovis2", "hidden_size": 1536, "image_token_id": 119, "vocab_size": 151936,
    "visual_indicator_token_ids": [120, 121, 122, 123, 124],
    "text_config": {
        "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "max_position_embeddings": 32768,
        "max_window_layers": 21, "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "vision_config": {
        "hidden_act": "silu", "hidden_size": 1024, "hidden_stride": 2, "image_size": 448, "intermediate_size": 2816,
        "mlp_bias": False, "model_type": "ovis2_vision", "num_attention_heads": 8, "num_hidden_layers": 24,
        "num_visual_indicator_tokens": 5, "patch_size": 14, "qkv_bias": False, "rms_norm_eps": 1e-5,
        "tokenize_function": "softmax", "vocab_size": 65536,
    },
}  # fmt: skip
OF_AYA = {"<|START_OF_IMG|>": 120, "<|END_OF_IMG|>": 121, "<|IMG_LINE_BREAK|>": 122, "TILE_GLOBAL": 123}
OF_AYA |= {f"TILE_{number}": 130 + number for number in range(1, 13)}
OF_OVIS = {"<image>": 118, "<IMG_START>": 120, "<IMG_GRID>": 121, "<IMG_COL>": 122, "<IMG_ROW>": 123, "<IMG_END>": 124}
SMALL = {"size": {"height": 224, "width": 224}}
SQUARE = {"size": {"height": 384, "width": 384}, "min_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN = {"min_pixels": 3136, "max_pixels": 12845056, "merge_size": 2, "temporal_patch_size": 2}
CASES = {
    "aya_vision": (AYA, OF_AYA, {"size": {"height": 364, "width": 364}, "max_patches": 12}, 32, 7 * 169, 27),
    "paligemma2": (PALIGEMMA2, {"\n": 108}, SMALL, 26, 256, 27),
    "paligemma": (PALIGEMMA, {"\n": 108}, SMALL, 18, 256, 27),
    "janus": (JANUS, {"<begin_of_image>": 120, "<end_of_image>": 121}, SQUARE, 24, 576, 24),
    "deepseek_vl": (DEEPSEEK, {}, SQUARE, 24, 576, 24),
    "qwen2_5_omni": (OMNI, {}, QWEN | {"patch_size": 14}, 28, 11 * 18, 32),
    "qwen3_omni": (OMNI_3, {}, QWEN | {"patch_size": 16}, 48, 9 * 16, 27),
    "ovis2": (
        OVIS2, OF_OVIS, {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "max_patches": 9},
        28, 3 * 256 + 4, 24,
    ),
}  # fmt: skip
