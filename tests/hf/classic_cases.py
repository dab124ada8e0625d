"""The tiny models of older families, as reference_cases.py has those of others."""

from reference_cases import FACTORS, MOE, rope

LAYERNORMS = {"rms_norm_eps": None}
TOKENS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL = {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 48}
OTHER_SIZES = ("gpt_bigcode", "gptj", "dbrx", "bloom", "mpt")  # model_types that have other names for what is in SIZES
FOUR = {**LAYERNORMS, "num_key_value_heads": None}
OWN_WIDTH = {**FOUR, "intermediate_size": None}
# name -> (model_type, options besides SIZES)
CLASSIC = {
    "opt": ("opt", {**OWN_WIDTH, "ffn_dim": 48}),
    "galactica": (
        "opt",
        {**OWN_WIDTH, "ffn_dim": 48, "enable_bias": False, "layer_norm_elementwise_affine": False}
        | {"activation_function": "gelu"},
    ),
    "phi": ("phi", {**LAYERNORMS, "qk_layernorm": True}),
    "phimoe": (
        "phimoe",
        {**MOE, "sliding_window": 9, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.2}
        | rope("longrope", **FACTORS, short_mscale=1.2, long_mscale=1.3, original_max_position_embeddings=64),
    ),
    "cohere": ("cohere", {**LAYERNORMS, "use_qk_norm": True, "logit_scale": 0.25}),
    "stablelm": ("stablelm", {**LAYERNORMS, "use_qkv_bias": True, **rope("default", partial_rotary_factor=0.5)}),
    "stablelm_parallel": (
        "stablelm",
        {**LAYERNORMS, "qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 2}
        | rope("default", partial_rotary_factor=0.5),
    ),
    "falcon": ("falcon", {**OWN_WIDTH, "ffn_hidden_size": 48}),
    "falcon_new": (
        "falcon",
        {**OWN_WIDTH, "ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
        | {"tie_word_embeddings": False},
    ),
    "gpt_bigcode": ("gpt_bigcode", SMALL),
    "minicpm3": (
        "minicpm3",
        {"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
        | {"num_key_value_heads": 4, "dim_model_base": 16, "scale_emb": 3, **rope("longrope", **FACTORS)}
        | {"original_max_position_embeddings": 16},
    ),
    "dbrx": (
        "dbrx",
        {**TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 64, **rope("default")}
        | {"attn_config": {"clip_qkv": 1.0, "kv_n_heads": 2, "rope_theta": 10000.0}}
        | {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}},
    ),
    "gptj": ("gptj", {**SMALL, "rotary_dim": 4}),
    "gpt_neo": (
        "gpt_neo",
        {**FOUR, "window_size": 6, "attention_types": [[["global", "local"], 1], [["local"], 1]]},
    ),
    "persimmon": ("persimmon", FOUR),
    "bloom": ("bloom", {**TOKENS, "hidden_size": 36, "n_layer": 3, "n_head": 6}),
    "mpt": (
        "mpt",
        {**TOKENS, "d_model": 36, "n_layers": 3, "n_heads": 6, "max_seq_len": 64, "attn_config": {"clip_qkv": 1.5}},
    ),
    "falcon_rw": (
        "falcon",
        {**OWN_WIDTH, "ffn_hidden_size": 48, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
}
