"""config.json of a GGUF file's model, as Hugging Face has it and models/ reads it: what llama.cpp's converter
(https://github.com/ggml-org/llama.cpp/tree/master/conversion) made of it, undone. What that leaves out is as llama.cpp
computes it, or as all published models of the architecture have it."""

from collections.abc import Callable, Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.gguf_files.header import Gguf
from shardlm.gguf_files.rotation import rotation
from shardlm.gguf_files.told import Told

_NO_MODEL = {"clip": "the half of a model that sees", "adapter": "adapters", "imatrix": "statistics"}
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config(gguf: Gguf) -> dict[str, Any]:
    """Raises ShardlmError for an architecture, and for options of one, that are not supported, by name."""
    architecture = check_architecture(gguf.metadata)
    told = Told(gguf.metadata, architecture)
    name, options = READERS[architecture](told, gguf)
    told.finish()
    ids = {ours: gguf.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _IDS.items()}
    plain = all(block.kind == "F32" for block in gguf.tensors.values())
    return {
        "architectures": [name],
        # Of F16 too: most were made of bfloat16, and what is computed exceeds float16 in some models.
        "dtype": "float32" if plain else "bfloat16",
        "vocab_size": _rows(gguf, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        **{ours: one for ours, one in ids.items() if one is not None},
        **options,
    }


def check_architecture(metadata: Mapping[str, Any]) -> str:
    """That of a file. Raises ShardlmError for one that is not supported, and for what is no model."""
    found = metadata.get("general.architecture")
    kind = metadata.get("general.type", "model")
    what = _NO_MODEL.get(found) or (_NO_MODEL.get(kind, kind) if kind != "model" else "")
    if what:
        raise ShardlmError(f"the GGUF file holds {what} (general.type={kind!r}); give the file of the model itself")
    if found not in READERS:
        raise ShardlmError(
            f"the GGUF file has general.architecture={found!r}, which shardlm does not have; it has "
            f"{', '.join(READERS)}"
        )
    return found


def heads(metadata: Mapping[str, Any]) -> tuple[int, int, int]:
    """(of queries, of keys and values, size of each)."""
    told = Told(metadata, metadata["general.architecture"])
    queries = told.count("attention.head_count")
    keys = told.count("attention.head_count_kv", queries)
    return queries, keys, told.count("attention.key_length", told.count("embedding_length") // queries)


def _rows(gguf: Gguf, name: str) -> int:
    if name not in gguf.tensors:
        raise ShardlmError(f"the GGUF file has no tensor {name}; download it again, or give the file of a whole model")
    return gguf.tensors[name].shape[0]


def _decoder(told: Told, gguf: Gguf, model_type: str, theta: float = 10_000.0) -> dict[str, Any]:
    """What nearly all of them have."""
    queries, keys, size = heads(gguf.metadata)
    for name in ("attention.head_count", "attention.head_count_kv", "attention.key_length"):
        told(name, None)
    told.only("attention.value_length", size)
    told.only("attention.causal", True)
    told("attention.layer_norm_epsilon", None)  # of another kind of norm
    return {
        "model_type": model_type,
        "hidden_size": told.count("embedding_length"),
        "num_hidden_layers": told.count("block_count"),
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": size,
        "intermediate_size": told.count("feed_forward_length"),
        "rms_norm_eps": told.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": told.count("context_length"),
        "hidden_act": "silu",
        **rotation(told, gguf, size, theta),
    }


def _biases(gguf: Gguf) -> dict[str, bool]:
    parts = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    return {name: True for name, part in parts.items() if f"blk.0.{part}.bias" in gguf.tensors}


def _no_experts(told: Told) -> None:
    told.only("expert_count", 0)
    told.only("expert_used_count", 0)


def _usual_routing(told: Told, *scored: int) -> None:
    """By a softmax, of those that are chosen made to sum to 1; `scored`: numbers of llama.cpp's for that."""
    told.only("expert_gating_func", 1, *scored)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    for name in ("expert_shared_count", "expert_shared_feed_forward_length"):
        told.only(name, 0)
    for name in ("expert_group_count", "expert_group_used_count"):
        told.only(name, 0, 1)


def _llama(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Also Mistral's, whose window is hardly ever told and llama.cpp does without, and Mixtral's."""
    told.only("attention.scale", 0.0)
    told.only("attention.temperature_scale", 0.0)
    told.only("expert_feed_forward_length", told("feed_forward_length"))
    window = {"sliding_window": told.count("attention.sliding_window", 0) or None}
    experts, chosen = told.count("expert_count", 0), told.count("expert_used_count", 0)
    if experts:
        _usual_routing(told)
        own = {"num_local_experts": experts, "num_experts_per_tok": chosen, **window}
        return "MixtralForCausalLM", _decoder(told, gguf, "mixtral") | own
    if window["sliding_window"]:
        return "MistralForCausalLM", _decoder(told, gguf, "mistral") | window
    return "LlamaForCausalLM", _decoder(told, gguf, "llama") | _biases(gguf)


def _qwen2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Qwen2ForCausalLM", _decoder(told, gguf, "qwen2") | {"use_sliding_window": False}


def _qwen3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Qwen3ForCausalLM", _decoder(told, gguf, "qwen3")


def _qwen3_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    _usual_routing(told)
    return "Qwen3MoeForCausalLM", _decoder(told, gguf, "qwen3_moe") | {
        "num_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    found = _gemma(told, gguf, "gemma2", period=2, largest=46)
    return "Gemma2ForCausalLM", found | {
        "attn_logit_softcapping": told.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": told.number("final_logit_softcapping", 30.0),
    }


def _gemma3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    theta = told.number("rope.global.freq_base", 1_000_000.0)  # Ollama's own converter's names, and the half that sees
    found = _gemma(told, gguf, "gemma3_text", period=6, largest=62, theta=theta)
    found["rope_local_base_freq"] = told.number("rope.freq_base_swa", told.number("rope.local.freq_base", 10_000.0))
    told.seen("vision.", "mm.")
    cap = told.number("final_logit_softcapping", 0)
    return "Gemma3ForCausalLM", found | ({"final_logit_softcapping": cap} if cap else {})


def _gemma(told: Told, gguf: Gguf, model_type: str, period: int, largest: int, theta: float = 10_000.0) -> dict:
    """Scores are scaled by the size of a head but in the largest model of each, as llama.cpp tells them apart by their
    layers; windows as llama.cpp has them where they are not told."""
    found = _decoder(told, gguf, model_type, theta)
    del found["hidden_act"]
    by_layer = told.list("attention.sliding_window_pattern")
    layers, size = found["num_hidden_layers"], found["head_dim"]
    if by_layer is None:
        every = told.count("attention.sliding_window_pattern", period)
        by_layer = [(layer + 1) % every != 0 for layer in range(layers)]
    scale = told.number("attention.scale", 0)
    per_head = found["hidden_size"] // found["num_attention_heads"] if layers == largest else size
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale**-2 if scale else per_head,
        "sliding_window": told.count("attention.sliding_window", 4096 if model_type == "gemma2" else ...),
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in by_layer],
    }


def _phi3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    found = _decoder(told, gguf, "phi3")
    window, scaling = told.count("attention.sliding_window", 0), found.get("rope_scaling", {})
    original = scaling.get("original_max_position_embeddings", told("rope.scaling.original_context_length", 0))
    _no_experts(told)
    return "Phi3ForCausalLM", found | {
        "sliding_window": window or None,
        "original_max_position_embeddings": original or found["max_position_embeddings"],
    }


def _gpt2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    told.only("attention.head_count_kv", told.count("attention.head_count"))
    return "GPT2LMHeadModel", {
        "model_type": "gpt2",
        "n_embd": told.count("embedding_length"),
        "n_layer": told.count("block_count"),
        "n_head": told.count("attention.head_count"),
        "n_inner": told.count("feed_forward_length"),
        "n_positions": told.count("context_length"),
        "layer_norm_epsilon": told.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _granite(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    _no_experts(told)
    return "GraniteForCausalLM", _decoder(told, gguf, "granite") | _biases(gguf) | {
        "attention_multiplier": told.number("attention.scale"),
        "embedding_multiplier": told.number("embedding_scale", 1.0) or 1.0,
        "residual_multiplier": told.number("residual_scale", 1.0) or 1.0,
        "logits_scaling": told.number("logit_scale", 1.0) or 1.0,
    }


def _olmo2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    told.only("attention.sliding_window", 0)  # OLMo 3 has one
    return "Olmo2ForCausalLM", _decoder(told, gguf, "olmo2")


def _smollm3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "SmolLM3ForCausalLM", _decoder(told, gguf, "smollm3") | _biases(gguf) | {"no_rope_layer_interval": 4}


def _glm4(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    told.only("nextn_predict_layers", 0)
    return "Glm4ForCausalLM", {"partial_rotary_factor": 1.0} | _decoder(told, gguf, "glm4") | _biases(gguf)


def _deepseek(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    told.only("expert_weights_scale", 1.0, 0.0)
    told.only("expert_gating_func", 1)
    experts = _of_deepseek(told) | {"norm_topk_prob": False, "scoring_func": "softmax"}
    return "DeepseekForCausalLM", _decoder(told, gguf, "deepseek") | experts


def _of_deepseek(told: Told) -> dict[str, Any]:
    return {
        "n_routed_experts": told.count("expert_count"),
        "n_shared_experts": told.count("expert_shared_count", 0),
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "first_k_dense_replace": told.count("leading_dense_block_count", 0),
    }


def _deepseek2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
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


def _gpt_oss(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    _usual_routing(told, 3)
    width = told.count("expert_feed_forward_length")
    told("feed_forward_length", None)
    told.values["feed_forward_length"] = width
    found = _decoder(told, gguf, "gpt_oss", theta=150_000.0)
    if "rope_scaling" in found:
        found["rope_scaling"]["truncate"] = False
    return "GptOssForCausalLM", found | {
        "attention_bias": True,
        "num_local_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "sliding_window": told.count("attention.sliding_window"),
    }


READERS: dict[str, Callable[[Told, Gguf], tuple[str, dict[str, Any]]]] = {
    "llama": _llama,
    "mistral3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "granite": _granite,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "glm4": _glm4,
    "deepseek": _deepseek,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}
