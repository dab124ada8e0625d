"""config.json of GGUF files whose models have experts; what is read of each is as in gguf_files/config.py."""

from typing import Any

from shardlm.gguf_files.decoder import biases, decoder, rows, usual_routing
from shardlm.gguf_files.header import Gguf
from shardlm.gguf_files.rotation import rotation
from shardlm.gguf_files.told import Told


def qwen3_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    usual_routing(told)
    return "Qwen3MoeForCausalLM", decoder(told, gguf, "qwen3_moe") | {
        "num_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """llama.cpp has experts in every layer, and never makes the weights of those that are chosen sum to 1."""
    _experts_scored(told, 1)
    told.only("expert_weights_norm", False)
    told.only("expert_weights_scale", 1.0, 0.0)
    own = {"qkv_bias": False} | biases(gguf, qkv_bias="attn_q") | beside_shared(told, gguf)
    own |= {"norm_topk_prob": False, "use_sliding_window": False}
    return "Qwen2MoeForCausalLM", decoder(told, gguf, "qwen2_moe") | own


def beside_shared(told: Told, gguf: Gguf) -> dict[str, Any]:
    """Qwen's experts in every layer, with a shared one that has a gate; its width is not told by older files."""
    width = rows(gguf, "blk.0.ffn_up_shexp.weight")
    told.only("expert_shared_feed_forward_length", width)
    told.only("expert_shared_count", 0, 1)
    experts = told.count("expert_count")
    return {
        "num_experts": experts,
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length", rows_of_an_expert(gguf)),
        "shared_expert_intermediate_size": width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def rows_of_an_expert(gguf: Gguf) -> int:
    """How wide experts are, of which the first layer has some; 0 where they are not all in one tensor."""
    block = gguf.tensors.get("blk.0.ffn_up_exps.weight")
    return block.shape[1] if block else 0


def _experts_scored(told: Told, *scored: int) -> None:
    """By the functions of llama.cpp's that these numbers are, all experts in one group."""
    told.only("expert_gating_func", *scored)
    for name in ("expert_group_count", "expert_group_used_count"):
        told.only(name, 0, 1)


def olmoe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    _experts_scored(told, 1)
    told.only("expert_weights_norm", False)
    told.only("expert_feed_forward_length", told("feed_forward_length"))
    return "OlmoeForCausalLM", decoder(told, gguf, "olmoe") | {
        "num_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "norm_topk_prob": False,
    }


def granite_factors(told: Told) -> dict[str, float]:
    return {
        "attention_multiplier": told.number("attention.scale"),
        "embedding_multiplier": told.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": told.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": told.number("logit_scale", 1.0) or 1.0,
    }


def granite_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Without a shared expert, which files of some of them have."""
    usual_routing(told)
    return "GraniteMoeForCausalLM", decoder(told, gguf, "granitemoe") | biases(gguf) | granite_factors(told) | {
        "num_local_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
    }


def glm4_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Layers that predict further tokens are left out."""
    own = {"attention_bias": False, "use_qk_norm": "blk.0.attn_q_norm.weight" in gguf.tensors}
    own |= biases(gguf, attention_bias="attn_q")
    found = {"partial_rotary_factor": 1.0} | decoder(told, gguf, "glm4_moe") | own | {"num_nextn_predict_layers": 0}
    return "Glm4MoeForCausalLM", found | _third(told)


def dots1(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Its windows are not told, and llama.cpp does without."""
    found = decoder(told, gguf, "dots1") | {"sliding_window": None, "layer_types": None} | _third(told)
    return "Dots1ForCausalLM", found | biases(gguf)


def _third(told: Told) -> dict[str, Any]:
    """Experts chosen as DeepSeek V3's, by sigmoids, biases and groups."""
    told.only("expert_gating_func", 2)
    return _of_deepseek(told) | {
        "n_group": told.count("expert_group_count", 0) or 1,
        "topk_group": told.count("expert_group_used_count", 0) or 1,
        "norm_topk_prob": bool(told("expert_weights_norm", False)),
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0) or 1.0,
    }


def minimax_m2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    _experts_scored(told, 2)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    told.only("expert_feed_forward_length", told("feed_forward_length"))
    return "MiniMaxM2ForCausalLM", decoder(told, gguf, "minimax_m2") | {
        "num_local_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "rotary_dim": told.count("rope.dimension_count"),
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
    }


def ernie_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """What is told of the shared experts' width is a guess of the converter's, and their number says it."""
    _experts_scored(told, 1)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    told("expert_shared_feed_forward_length", None)
    return "Ernie4_5_MoeForCausalLM", decoder(told, gguf, "ernie4_5_moe") | {
        "moe_num_experts": told.count("expert_count"),
        "moe_k": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "moe_num_shared_experts": told.count("expert_shared_count", 0),
        "moe_layer_start_index": told.count("leading_dense_block_count", 0),
        "moe_layer_interval": told.count("interleave_moe_layer_step"),
        "moe_layer_end_index": -1,
    }


def deepseek(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    told.only("expert_weights_scale", 1.0, 0.0)
    told.only("expert_gating_func", 1)
    experts = _of_deepseek(told) | {"norm_topk_prob": False, "scoring_func": "softmax"}
    return "DeepseekForCausalLM", decoder(told, gguf, "deepseek") | experts


def _of_deepseek(told: Told) -> dict[str, Any]:
    return {
        "n_routed_experts": told.count("expert_count"),
        "n_shared_experts": told.count("expert_shared_count", 0),
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "first_k_dense_replace": told.count("leading_dense_block_count", 0),
    }


def deepseek2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """V2 and V3, which differ in how experts are scored. Layers that predict further tokens are left out."""
    third = told("expert_gating_func", 1) == 2
    told.only("expert_gating_func", 1, 2, 0)
    told.only("attention.temperature_scale", 0.0)
    rotated = told.count("rope.dimension_count")
    key = told.count("attention.key_length_mla", told("attention.key_length", None))
    value = told.count("attention.value_length_mla", told("attention.value_length", None))
    # Files of before mid-2025 do not tell V3's and R1's groups.
    usual = (8, 4) if third and told.count("expert_count") == 256 else (1, 1)
    groups = told.count("expert_group_count", usual[0]) or 1
    top = told.count("expert_group_used_count", usual[1]) or 1
    further = told.count("nextn_predict_layers", 0)
    told("attention.head_count_kv", None)
    found = {
        "model_type": "deepseek_v3" if third else "deepseek_v2",
        "hidden_size": told.count("embedding_length"),
        "num_hidden_layers": told.count("block_count") - further,
        "num_attention_heads": told.count("attention.head_count"),
        "num_key_value_heads": told.count("attention.head_count"),
        "intermediate_size": told.count("feed_forward_length"),
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": told.count("context_length"),
        "hidden_act": "silu",
        "q_lora_rank": told.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": told.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "n_group": groups,
        "topk_group": top,
        "topk_method": "noaux_tc" if third else "group_limited_greedy" if groups > 1 else "greedy",
        "scoring_func": "sigmoid" if third else "softmax",
        "norm_topk_prob": bool(told("expert_weights_norm", False)),
        "routed_scaling_factor": told.number("expert_weights_scale", 1.0) or 1.0,
        "num_nextn_predict_layers": 0,
        **_of_deepseek(told),
        **rotation(told, gguf, rotated),
    }
    weight = told.number("rope.scaling.yarn_log_multiplier", 0)
    if weight and "rope_scaling" in found:  # a tenth of it, and one for what all published ones have twice
        found["rope_scaling"] |= {"mscale": round(10 * weight, 6), "mscale_all_dim": round(10 * weight, 6)}
    return f"Deepseek{'V3' if third else 'V2'}ForCausalLM", found


def gpt_oss(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    usual_routing(told, 3)
    width = told.count("expert_feed_forward_length")
    told("feed_forward_length", None)
    told.values["feed_forward_length"] = width
    found = decoder(told, gguf, "gpt_oss", theta=150_000.0)
    if "rope_scaling" in found:
        found["rope_scaling"]["truncate"] = False
    return "GptOssForCausalLM", found | {
        "attention_bias": True,
        "num_local_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "sliding_window": told.count("attention.sliding_window"),
    }
