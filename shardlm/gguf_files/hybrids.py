"""config.json of GGUF files whose models have layers that do not attend: linear attention of Qwen3-Next and Qwen 3.5,
whose tensors are linear_attention.py's, and short convolutions of LFM2."""

from typing import Any

from shardlm.gguf_files.decoder import decoder, no_experts
from shardlm.gguf_files.header import Gguf
from shardlm.gguf_files.mixtures import beside_shared
from shardlm.gguf_files.told import Told


def qwen3_next(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Qwen3NextForCausalLM", _hybrid(told, gguf, "qwen3_next") | _routed(told, gguf)


def qwen3_5(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    no_experts(told)
    return "Qwen3_5ForCausalLM", _hybrid(told, gguf, "qwen3_5_text")


def qwen3_5_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Qwen3_5MoeForCausalLM", _hybrid(told, gguf, "qwen3_5_moe_text") | _routed(told, gguf)


def _routed(told: Told, gguf: Gguf) -> dict[str, Any]:
    told.only("expert_gating_func", 1)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    return beside_shared(told, gguf) | {"norm_topk_prob": True}


def _hybrid(told: Told, gguf: Gguf, model_type: str) -> dict[str, Any]:
    """Layers that predict further tokens are left out. Of texts alone, all sections of the rotation are at the same
    positions, and change nothing."""
    told.list("rope.dimension_sections")
    if model_type == "qwen3_5_moe_text":
        told.values.setdefault("feed_forward_length", 1)  # it has experts in all layers, and makes no use of it
    found = decoder(told, gguf, model_type)
    partial = found.pop("partial_rotary_factor", 1.0)
    theta = found.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta} | found.pop("rope_scaling", {})
    values = told.count("ssm.time_step_rank")
    size, left = divmod(told.count("ssm.inner_size"), values)
    if left:
        raise told.refused("ssm.inner_size", f"ssm.time_step_rank={values} heads of values do not divide it")
    return found | {
        "rope_parameters": rope | {"partial_rotary_factor": partial},
        "layer_types": _kinds(told, found["num_hidden_layers"]),
        "linear_num_key_heads": told.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": told.count("ssm.state_size"),
        "linear_value_head_dim": size,
        "linear_conv_kernel_dim": told.count("ssm.conv_kernel"),
    }


def _kinds(told: Told, layers: int) -> list[str]:
    """By a list of the layers, or as one of so many, the last of them, attends to tokens."""
    every, linear = told.count("full_attention_interval", 4), told.list("attention.recurrent_layers")
    linear = linear or [(layer + 1) % every != 0 for layer in range(layers)]
    return ["linear_attention" if each else "full_attention" for each in linear[:layers]]


def lfm2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    no_experts(told)
    return "Lfm2ForCausalLM", _convolving(told, gguf, "lfm2") | {"block_auto_adjust_ff_dim": False}


def lfm2_moe(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Scores are sigmoids, those that are chosen are made to sum to 1, and llama.cpp has no factor."""
    told.only("expert_gating_func", 2)
    told.only("expert_weights_norm", True)
    told.only("expert_weights_scale", 1.0, 0.0)
    return "Lfm2MoeForCausalLM", _convolving(told, gguf, "lfm2_moe") | {
        "num_dense_layers": told.count("leading_dense_block_count", 0),
        "num_experts": told.count("expert_count"),
        "num_experts_per_tok": told.count("expert_used_count"),
        "moe_intermediate_size": told.count("expert_feed_forward_length"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in gguf.tensors),
        "norm_topk_prob": True,
    }


def _convolving(told: Told, gguf: Gguf, model_type: str) -> dict[str, Any]:
    """Which layers convolve is told by their tensors."""
    found = decoder(told, gguf, model_type)
    del found["hidden_act"], found["head_dim"]
    convolve = [f"blk.{layer}.shortconv.conv.weight" in gguf.tensors for layer in range(found["num_hidden_layers"])]
    eps = found.pop("rms_norm_eps")
    return found | {
        "norm_eps": eps,
        "conv_L_cache": told.count("shortconv.l_cache"),
        "layer_types": ["conv" if each else "full_attention" for each in convolve],
    }
