"""The tiny models of each family whose checkpoints and numbers make_references.py writes: their options."""

from reference_parts import (
    DENSE_MLA,
    GEMMA4,
    HYBRID,
    INDEXED,
    LONG,
    MLA,
    MOE,
    ROUTED,
    STEP,
    STEP_VISION,
    WINDOWED,
    YARN,
    rope,
)

COMPRESSED = ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
COMPRESSED += ["heavily_compressed_attention", "compressed_sparse_attention"]
EVERY = {**ROUTED, "first_k_dense_replace": 0}
# State space models beside attention (Mamba 2).
GRANITE_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 20,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
}
NEMOTRON_H = {
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
}
# Short convolutions between layers that attend (LFM2).
LFM2 = {"rms_norm_eps": None, "layer_types": ["conv", "full_attention", "conv"]}
# State space models beside attention in each layer.
FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_head": 12,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.7,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "mlp_multipliers": [1.4, 0.6],
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.8, 1.3, 0.9, 1.1, 0.7],
}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
# name -> (model_type, options besides SIZES)
CASES = {
    "llama": ("llama", {}),
    "llama4": (
        "llama4_text",
        {"intermediate_size": 24, "intermediate_size_mlp": 48, "head_dim": 8, "num_hidden_layers": 4, "floor_scale": 8}
        | {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 7}
        | {"no_rope_layer_interval": 4, "attn_scale": 0.5},
    ),
    "llama_tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 10}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama_linear": ("llama", rope("linear", factor=4.0)),
    "llama_dynamic": ("llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 16}),
    "llama_llama3": ("llama", rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **LONG)),
    "llama_yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mixtral": ("mixtral", {**MOE, "sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}
        | {"moe_intermediate_size": 24, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3},
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3_moe": (
        "qwen3_moe",
        {**MOE, "head_dim": 8, "norm_topk_prob": True, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "deepseek": ("llama", {"num_key_value_heads": 4}),
    "deepseek_v2": (
        "deepseek_v2",
        {**MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **MLA,
            "q_lora_rank": 20,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        {**MLA, **INDEXED, "n_group": 4, "topk_group": 2}
        | {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}},
    ),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**MLA, **INDEXED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "deepseek_v4": (
        "deepseek_v4",
        {"num_hidden_layers": 5, "layer_types": COMPRESSED, "mlp_layer_types": ["hash_moe", "hash_moe", *["moe"] * 3]}
        | {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, "head_dim": 16}
        | {"partial_rotary_factor": 0.5, "q_lora_rank": 20, "o_groups": 2, "o_lora_rank": 10, "sliding_window": 6}
        | {"index_n_heads": 14, "index_head_dim": 12, "index_topk": 3, "hc_mult": 3, "hc_sinkhorn_iters": 4}
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "swiglu_limit": 0.4}
        | {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "yarn", **LONG}},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**MLA, "n_group": 4, "topk_group": 2}),
    "youtu": ("youtu", DENSE_MLA),
    "mistral4": (
        "mistral4",
        {**MLA, "rope_parameters": {**YARN, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    ),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 10}),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 6, "sliding_window_pattern": 2}),
    "gemma4": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 4, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": 96, "num_hidden_layers": 7, "layer_types": WINDOWED + GEMMA4["layer_types"]},
    ),
    "gemma4_moe": (
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "phi3": ("phi3", {"sliding_window": 9}),
    "phi3_long": (
        "phi3",
        {**rope("longrope", **FACTORS), "original_max_position_embeddings": 16, "partial_rotary_factor": 1.0},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 6, "num_hidden_layers": 4, "rope_scaling": YARN}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "seed_oss": ("seed_oss", {"head_dim": 8}),
    "ministral3": ("ministral3", {"head_dim": 12, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5}}),
    "gemma": ("gemma", {"head_dim": 12}),
    "exaone4": ("exaone4", {"sliding_window": 6, "sliding_window_pattern": 2}),
    "starcoder2": ("starcoder2", {"sliding_window": 6, "rms_norm_eps": None}),
    "arcee": ("arcee", {}),
    "cohere2": (
        "cohere2",
        {"sliding_window": 6, "sliding_window_pattern": 2, "logit_scale": 0.25, "rms_norm_eps": None},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.2,
            "logits_scaling": 8.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {**MOE, "embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.2},
    ),
    "ernie4_5": ("ernie4_5", {"head_dim": 12}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 12, **rope("dynamic", alpha=50.0, factor=1.0)}),
    "glm4": ("glm4", {"head_dim": 8, "attention_bias": True}),
    "glm4_moe": (
        "glm4_moe",
        {**ROUTED, "head_dim": 12, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": True},
    ),
    "dots1": (
        "dots1",
        {**ROUTED, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "sliding_window": 6, "max_window_layers": 2},
    ),
    "solar_open": ("solar_open", {**EVERY, "head_dim": 12, "n_group": 4, "topk_group": 2}),
    "exaone_moe": (
        "exaone_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "sliding_window": 6}
        | {"sliding_window_pattern": 2, "head_dim": 8},
    ),
    "hy_v3": (
        "hy_v3",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}
        | {"router_scaling_factor": 1.5},
    ),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "glm": ("glm", {"head_dim": 8, "attention_bias": True, **rope("default", partial_rotary_factor=0.5)}),
    "helium": ("helium", {"head_dim": 8, "num_key_value_heads": 4}),
    "olmo": ("olmo", {"clip_qkv": 1.5, "rms_norm_eps": None}),
    "granitemoeshared": (
        "granitemoeshared",
        {**MOE, "shared_intermediate_size": 20, "attention_multiplier": 0.1, "residual_multiplier": 0.2},
    ),
    "granite_swa": (
        "granite_swa",
        {"sliding_window": 6, "num_hidden_layers": 5, "layer_rope_theta": [0, 10000.0, 10000.0, 500.0, 0]}
        | {"attention_multiplier": 0.1, "residual_multiplier": 0.2, "embedding_multiplier": 12.0},
    ),
    "granitemoe_swa": (
        "granitemoe_swa",
        {**MOE, "shared_intermediate_size": 20, "sliding_window": 6, "attention_multiplier": 0.1},
    ),
    "hunyuan_moe": (
        "hunyuan_v1_moe",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 12, **rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "afmoe": (
        "afmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 8}
        | {"moe_intermediate_size": 24, "sliding_window": 6, "global_attn_every_n_layers": 3, "route_scale": 1.5}
        | {"mup_enabled": True},
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 2, "first_k_dense_replace": 1}
        | {"prefix_dense_intermediate_size": 40, "sliding_window": 6, "sliding_window_pattern": 3, "head_dim": 8}
        | {"logit_scale": 0.25, "shared_expert_combination_strategy": "average", "rms_norm_eps": None},
    ),
    "apertus": ("apertus", {}),
    "nanochat": ("nanochat", {"num_key_value_heads": 2, "intermediate_size": 64}),
    "laguna": (
        "laguna",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
        | {"head_dim": 8, "sliding_window": 6, "layer_types": ["full_attention", *WINDOWED[:2]]}
        | {"num_attention_heads_per_layer": [4, 6, 6], "moe_routed_scaling_factor": 1.5},
    ),
    "nemotron": ("nemotron", {"rms_norm_eps": None}),
    "minimax_m2": ("minimax_m2", {**MOE, "head_dim": 12, "rotary_dim": 6}),
    "gpt2": ("gpt2", {}),
    "gpt_oss": (
        "gpt_oss",
        {**MOE, "head_dim": 8, "sliding_window": 6, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "qwen3_next": (
        "qwen3_next",
        {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "kimi_linear": (
        "kimi_linear",
        {**DENSE_MLA, "q_lora_rank": None, "num_local_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
        | {"moe_intermediate_size": 24, "linear_head_dim": 8, "linear_num_heads": 4, "num_hidden_layers": 4}
        | {"layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"], "n_group": 4}
        | {"topk_group": 2},
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12, "v_head_dim": 8}
        | {"sliding_window": 6, "num_hidden_layers": 4, "num_key_value_heads": 1},
    ),
    "step3p5": ("step3p7", {"text_config": STEP, "vision_config": STEP_VISION}),  # without its sight, below
    "olmo_hybrid": (
        "olmo_hybrid",
        {**{name: value for name, value in HYBRID.items() if name != "head_dim"}, "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 1}
        | {"tie_word_embeddings": True},
    ),
    "granitemoehybrid_moe": (
        "granitemoehybrid",
        {**GRANITE_HYBRID, **MOE, "mamba_n_groups": 2, "position_embedding_type": "rope", "time_step_limit": [0.5, 2.0]}
        | {"mamba_conv_bias": False, "intermediate_size": 24},
    ),
    "bamba": (
        "bamba",
        {name: value for name, value in GRANITE_HYBRID.items() if name.startswith("mamba")}
        | {"attn_layer_indices": [1], "mamba_n_groups": 2},
    ),
    "lfm2": ("lfm2", {**LFM2, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.2}),
    "lfm2_moe": (
        "lfm2_moe",
        {**LFM2, "conv_L_cache": 4, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    ),
    "falcon_h1": ("falcon_h1", {**FALCON_H1, "num_hidden_layers": 2}),
    "falcon_h1_norm": (
        "falcon_h1",
        {**FALCON_H1, "num_hidden_layers": 2, "mamba_rms_norm": True}
        | {"mamba_conv_bias": False, "tie_word_embeddings": True, "mamba_d_ssm": None, "mamba_d_head": 16},
    ),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "moe"]}
        | {"moe_latent_size": 16, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {**NEMOTRON_H, "layers_block_type": [*["linear_attention", "moe"] * 2, "full_attention", "moe"]},
    ),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "qwen4_exp": (
        "qwen4_exp_text",
        {**HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "eos_token_id": [61, 2]}
        | {"shared_expert_intermediate_size": 20, "hc_count": 3, "hc_lowrank": 10, "output_gate_type": "sigmoid"}
        | {"ple_layer_ids": [1, 3], "ple_embed_dim": 32, "ple_conv_kernel_size": 3, "heads_per_ngram": 2}
        | {"ngram_vocab_size_base": 40, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 3}
        | {"indexer_n_heads": 6, "indexer_kv_heads": 1, "indexer_head_dim": 12, "indexer_budget": 6}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        | {"indexer_compress_ratio": 3, "seed": 14, **rope("default", partial_rotary_factor=0.5)},
    ),
}
# What DeepSeek MoE (arXiv 2401.06066) has besides Llama's options. Its own code is not part of transformers.
EXPERTS = {
    "model_type": "deepseek",
    "architectures": ["DeepseekForCausalLM"],
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}
