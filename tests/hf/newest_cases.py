"""The tiny models of the newest families, as reference_cases.py has those of others."""

from reference_parts import DENSE_MLA, INDEXED, LONG, MLA, ROUTED, SIZES, WINDOWED, YARN, rope

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
