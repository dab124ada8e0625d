"""The metadata of GGUF files for tests, as set_gguf_parameters of llama.cpp's converter
(https://github.com/ggml-org/llama.cpp/tree/master/conversion) makes it of config.json."""

import math
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "gpt_oss": "gpt-oss",
    "qwen2_moe": "qwen2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "ministral3": "mistral3",
    "glm4_moe": "glm4moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "minimax_m2": "minimax-m2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "olmo3": "olmo2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
}
LINEAR = ("qwen3next", "qwen35", "qwen35moe")
WINDOWED = ("olmo2", "exaone4", "cohere2")
MAMBA = ("granitehybrid", "nemotron_h", "nemotron_h_moe")
PERMUTED = ("llama", "arcee", "mistral3", "granite", "granitemoe", "smollm3", "deepseek", *MAMBA)


def parameters(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """TextModel.set_gguf_parameters of conversion/base.py."""
    get = config.get
    rope = get("rope_parameters") or {}
    of_all = rope.get("full_attention", rope)
    heads = get("num_attention_heads") or get("n_head")
    hidden = get("hidden_size") or get("n_embd")
    head_dim = get("head_dim") or hidden // heads
    experts = get("num_local_experts") or get("num_experts") or get("n_routed_experts")
    latent = arch == "deepseek2"
    found = {
        "block_count": get("num_hidden_layers") or get("n_layer"),
        "context_length": get("max_position_embeddings") or get("n_positions"),
        "embedding_length": hidden,
        "feed_forward_length": get("intermediate_size") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": 1 if latent else get("num_key_value_heads"),
        "rope.freq_base": None if arch in ("gemma", "gemma2", "gpt2") else of_all.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "attention.layer_norm_rms_epsilon": get("rms_norm_eps") or get("norm_eps"),
        "attention.layer_norm_epsilon": get("layer_norm_eps") or get("layer_norm_epsilon") or get("norm_epsilon"),
        "expert_count": experts,
        "expert_used_count": get("num_experts_per_tok"),
        "expert_group_count": get("n_group"),
        "expert_group_used_count": get("topk_group"),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_count": get("n_shared_experts"),
        "leading_dense_block_count": get("first_k_dense_replace"),
        "attention.key_length": get("head_dim"),
        "attention.value_length": get("head_dim"),
    }
    own = _latent(config, of_all) if latent else _own(config, arch, of_all)
    scoring = {"softmax": 1, "sigmoid": 2}.get(get("scoring_func"))
    found["expert_gating_func"] = 2 if config["model_type"] == "deepseek_v3" else scoring
    found |= _stretched(of_all)
    if arch in PERMUTED:
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": head_dim}
    return {f"{arch}.{name}": value for name, value in (found | own).items() if value is not None}


def _own(config: Mapping[str, Any], arch: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """What architectures add."""
    get, found = config.get, _of_experts(config, arch, rope)
    if arch == "gemma3":
        found |= {"attention.sliding_window": config["sliding_window"], "rope.freq_base_swa": 10000.0}
    if arch == "gemma2":
        found |= {
            "attn_logit_softcapping": config["attn_logit_softcapping"],
            "final_logit_softcapping": config["final_logit_softcapping"],
            "attention.sliding_window": config["sliding_window"],
        }
    if arch == "phi3":
        original = config["original_max_position_embeddings"]
        partial = rope.get("partial_rotary_factor", 1.0)
        found["rope.scaling.original_context_length"] = original
        found["rope.dimension_count"] = int(partial * config["hidden_size"]) // config["num_attention_heads"]
        found["attention.sliding_window"] = get("sliding_window") or 0
        if rope.get("long_factor"):
            scale = config["max_position_embeddings"] / original
            found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original))
    if arch == "granite":
        found |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    if arch == "glm4":
        found["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
    if arch in WINDOWED and get("sliding_window"):
        found["attention.sliding_window"] = config["sliding_window"]
        if arch != "cohere2":
            windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
            found["attention.sliding_window_pattern"] = windowed
    if arch == "cohere2":
        found |= {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
        found |= {"vocab_size": config["vocab_size"], "rope.dimension_count": config["head_dim"]}
    if arch == "hunyuan-dense":
        dim = config["head_dim"]
        found |= {
            "rope.freq_base": rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2)),
            "rope.scaling.type": "none",
        }
        found |= {
            "rope.scaling.factor": 1.0,
            "rope.scaling.original_context_length": 1 << 18,
            "context_length": 1 << 18,
        }
    if arch == "mistral3" and "llama_4_scaling_beta" in rope:
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return found


def _of_experts(config: Mapping[str, Any], arch: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The same of mixtures, and of what has layers of linear attention."""
    found: dict[str, Any] = {}
    if arch == "deepseek":
        found |= {"rope.scaling.type": "none", "expert_weights_scale": 1.0}
    if arch == "granitemoe":
        found |= _own(config, "granite", rope)
    if arch in ("qwen2moe", "qwen3next", "qwen35moe"):
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if arch in LINEAR:
        found |= _linear(config, rope) | ({} if arch == "qwen3next" else {"rope.dimension_sections": [11, 11, 10, 0]})
    if arch in ("glm4moe", "dots1"):
        found |= {"expert_weights_scale": config["routed_scaling_factor"], "expert_gating_func": 2}
        found["expert_weights_norm"] = config["norm_topk_prob"]
    if arch == "glm4moe":
        found["rope.dimension_count"] = int(config["head_dim"] * rope["partial_rotary_factor"])
        found["nextn_predict_layers"] = config["num_nextn_predict_layers"]
        found["block_count"] = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    if arch == "minimax-m2":
        found |= {
            "expert_feed_forward_length": config["intermediate_size"],
            "rope.dimension_count": config["rotary_dim"],
        }
        found["expert_gating_func"] = 2
    if arch == "ernie4_5-moe":
        found |= {
            "expert_count": config["moe_num_experts"],
            "expert_used_count": config["moe_k"],
            "interleave_moe_layer_step": config["moe_layer_interval"],
            "leading_dense_block_count": config["moe_layer_start_index"],
            "expert_shared_count": config["moe_num_shared_experts"],
            "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
        }
    if arch in MAMBA:
        found |= _granite_hybrid(config) if arch == "granitehybrid" else _nemotron(config)
    if arch in ("lfm2", "lfm2moe"):
        found |= _convolving(config)
    if arch == "gpt-oss":
        found["attention.sliding_window"] = config["sliding_window"]
        found["expert_feed_forward_length"] = config["intermediate_size"]
    return found


def _granite_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """GraniteHybridModel's."""
    attends = [kind == "full_attention" for kind in config["layer_types"]]
    return _own(config, "granite", {}) | {
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] if each else 0 for each in attends],
        "rope.scaling.finetuned": config["position_embedding_type"] == "rope",
        "context_length": 1 << 20,
    }


def _nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    """NemotronHModel's."""
    kinds, routed = config["layers_block_type"], "moe" in config["layers_block_type"]
    width = config["moe_intermediate_size"] if routed else config["intermediate_size"]
    found: dict[str, Any] = {
        "block_count": len(kinds),
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "feed_forward_length": [width * (kind in ("mlp", "moe")) for kind in kinds],
        "rope.scaling.finetuned": False,
        "context_length": 1 << 20,
    }
    if routed:
        found |= {
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "moe_latent_size": config["moe_latent_size"],
        }
    return found


def _convolving(config: Mapping[str, Any]) -> dict[str, Any]:
    """LFM2Model's and LFM2MoeModel's."""
    keys = config["num_key_value_heads"]
    found: dict[str, Any] = {
        "attention.head_count_kv": [0 if kind == "conv" else keys for kind in config["layer_types"]],
        "vocab_size": config["vocab_size"],
        "shortconv.l_cache": config["conv_L_cache"],
    }
    if config["model_type"] == "lfm2_moe":
        return found | {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
    width, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
    width = -(-int(config["block_ffn_dim_multiplier"] * width) // multiple) * multiple
    return found | {"feed_forward_length": width}


def _linear(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3NextModel's."""
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        "full_attention_interval": config.get("full_attention_interval", 4),
        "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
    }


def _latent(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    rotated, latent_dim = config["qk_rope_head_dim"], config["kv_lora_rank"]
    return {
        "vocab_size": config["vocab_size"],
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": latent_dim,
        "attention.key_length": latent_dim + rotated,
        "attention.value_length": latent_dim,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"] if "mscale_all_dim" in rope else None,
    }


def _stretched(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind, factor = rope.get("rope_type"), rope.get("factor")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    if kind == "longrope":
        return {"rope.scaling.type": "longrope"}
    if kind != "yarn":
        return {}
    names = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        **{f"rope.scaling.yarn_{theirs}": rope[name] for name, theirs in names.items() if name in rope},
    }
