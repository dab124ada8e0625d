"""The tiny models of the newest families, as reference_cases.py has those of others."""

from reference_parts import DENSE_MLA, HYBRID, INDEXED, LONG, MLA, MOE, ROUTED, SIZES, WINDOWED, YARN, rope

MISTRAL_LARGE4 = {
    **{name: value for name, value in {**SIZES, **MLA, **INDEXED}.items() if name != "q_lora_rank"},
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "indexer_types": ["full", "full", "shared", "full"],
    "index_n_heads": 14,  # fewer give scores of 0, which are alike
    "qk_nope_head_dim": 6,
    "kv_source_layers": [0, 1, 2, 3],
    "final_logit_softcapping": 5.0,
    "rope_parameters": {**YARN, "attention_factor": 1.0},
}
MUSE = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 5.0,
    "post_norm_eps": 1e-3,  # which is felt where what layers make is little
    "output_multiplier": 0.7,
}
GLM5_NEXT = {
    **{name: value for name, value in {**SIZES, **MLA, **INDEXED}.items() if name != "first_k_dense_replace"},
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "hc_sinkhorn_iters": 4,
    "qk_rope_head_dim": 0,
    "index_kpool": 3,
    "index_topk": 6,
    "index_n_heads": 14,  # fewer give scores of 0, which are alike
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "hc_mult": 3,
    "swiglu_limit": 0.4,
}
MINIMAX_M3 = {
    **SIZES,
    **MOE,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "rotary_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "dense_intermediate_size": 40,
    "shared_intermediate_size": 20,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "index_n_heads": 2,
    "index_head_dim": 12,
    "index_block_size": 3,
    "index_topk_blocks": 4,
    "index_local_blocks": 2,
}
# name -> (model_type, options besides SIZES)
NEWEST = {
    "iquestcoder": ("iquestcoder", {"head_dim": 12}),
    "cwm": (
        "cwm",
        {"sliding_window": 6, "head_dim": 12, **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **LONG)},
    ),
    "ministral": ("ministral", {"sliding_window": 6, "head_dim": 12, "layer_types": WINDOWED}),
    "vaultgemma": ("vaultgemma", {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 10}),
    "sarvam_moe": ("sarvam_moe", {**ROUTED, "head_dim": 12, "use_qk_norm": True, "n_group": 1, "topk_group": 1}),
    "sarvam_mla": ("sarvam_mla", {**MLA, "q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "mellum": (
        "mellum",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        | {"sliding_window": 6, "layer_types": WINDOWED, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "gemma3n": (
        "gemma3n_text",
        {"head_dim": 12, "sliding_window": 6, "num_hidden_layers": 4, "layer_types": WINDOWED[1:] * 2}
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 80}
        | {"laurel_rank": 10, "altup_num_inputs": 3, "activation_sparsity_pattern": [0.8, 0.0, 0.8, 0.0]}
        | {"intermediate_size": [48, 48, 40, 40], "final_logit_softcapping": 5.0},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**DENSE_MLA, "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "head_dim": 8}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "q_lora_rank": None}
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "routed_scaling_factor": 1.5}
        | {"num_nextn_predict_layers": 0},
    ),
    "hy_v4": (
        "hy_v4",
        {**MLA, **INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "hc_mult": 3, "swiglu_limit": 0.4}
        | {"hc_magnitude": 1.7, "norm_topk_prob": True},
    ),
    "mistral_large4": (
        "mistral_large4",  # without its sight, make_references.py
        {"text_config": MISTRAL_LARGE4, "tie_word_embeddings": False}
        | {
            "vision_config": {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "image_size": 8}
            | {"intermediate_size": 16, "num_attention_heads": 2, "patch_size": 2, "head_dim": 8}
        },
    ),
    "flint": (
        "flint",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12, "sliding_window": 6}
        | {"shared_expert_intermediate_size": 20, "layer_types": WINDOWED, "mlp_only_layers": [0]},
    ),
    "kolibri1": (
        "kolibri1",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12, "sliding_window": 6}
        | {"shared_expert_intermediate_size": 20, "layer_types": WINDOWED},
    ),
    "lara_mini": (
        "lara_mini",
        {**HYBRID, "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]}
        | {"num_hidden_layers": 4, "sliding_window": 6, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "muse_glimmer": (
        "muse_glimmer",  # without its sight, make_references.py
        {"text_config": MUSE, "tie_word_embeddings": False}
        | {"vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}},
    ),
    "minimax": (
        "minimax",
        {**MOE, "head_dim": 12, "block_size": 5, "num_hidden_layers": 4, "linear_attn_alpha_factor": 1.3}
        | {"full_attn_alpha_factor": 1.2, "mlp_alpha_factor": 0.8}
        | {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
    ),
    "minimax_m3": (
        "minimax_m3_vl",  # without its sight, make_references.py
        {"text_config": MINIMAX_M3, "tie_word_embeddings": False, "projector_hidden_size": 16}
        | {
            "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8}
            | {"num_attention_heads": 2, "patch_size": 2}
        },
    ),
    "longcat_flash": (
        "longcat_flash",
        {
            **DENSE_MLA,
            "num_hidden_layers": 4,
            "intermediate_size": 40,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "head_dim": 8,
        }
        | {"zero_expert_num": 2, "expert_ffn_hidden_size": 24, "routed_scaling_factor": 1.5},
    ),
    "glm5_next": (
        "glm5_next",  # without its sight, make_references.py
        {"text_config": GLM5_NEXT, "tie_word_embeddings": False}
        | {
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "image_size": 8, "patch_size": 2}
            | {"out_hidden_size": 32, "intermediate_size": 16, "projection_intermediate_size": 16}
        },
    ),
    "gpt_neox": (
        "gpt_neox",
        {"rms_norm_eps": None, "num_key_value_heads": None, **rope("default", partial_rotary_factor=0.5)},
    ),
    "jais2": ("jais2", {"rms_norm_eps": None}),
    "hyperclovax": (
        "hyperclovax",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 0.5},
    ),
    "lfm3": (
        "lfm3",
        {"rms_norm_eps": 1e-4, "head_dim": 12, "sliding_window": 6, "conv_L_cache": 5, "num_hidden_layers": 4}
        | {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    ),
}
