"""Options that several of the tiny models have: sizes, rotations, latent attention, experts, layers of two kinds."""

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONG = {"factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, **LONG}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DENSE_MLA = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
}
MLA = {**DENSE_MLA, **ROUTED}
INDEXED = {"index_topk": 7, "index_n_heads": 6, "index_head_dim": 12}


def rope(kind: str, **options) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
WINDOWED = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "final_logit_softcapping": 5.0,
}
STEP = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 1.5,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_sliding_attention_heads": 6,
    "rope_theta": [500.0, 10000.0, 10000.0, 500.0],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "swiglu_limits": [0.0, 0.3, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.2, 0.0],
}
STEP_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 2}
STEP_VISION |= {"mlp_ratio": 1.0}
