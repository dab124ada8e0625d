"""config.json of a GGUF file's model, as Hugging Face has it and models/ reads it: what llama.cpp's converter
(https://github.com/ggml-org/llama.cpp/tree/master/conversion) made of it, undone. What that leaves out is as llama.cpp
computes it, or as all published models of the architecture have it."""

from collections.abc import Callable, Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.gguf_files import hybrids, mamba, mixtures
from shardlm.gguf_files.decoder import biases, decoder, no_experts, rows, usual_routing, windows
from shardlm.gguf_files.header import Gguf
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
        "vocab_size": rows(gguf, "token_embd.weight"),
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


def _llama(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Also Mistral's, whose window is hardly ever told and llama.cpp does without, and Mixtral's."""
    told.only("attention.scale", 0.0)
    if told.number("attention.temperature_scale", 0):
        return _ministral3(told, gguf)
    told.only("expert_feed_forward_length", told("feed_forward_length"))
    window = {"sliding_window": told.count("attention.sliding_window", 0) or None}
    experts, chosen = told.count("expert_count", 0), told.count("expert_used_count", 0)
    if experts:
        usual_routing(told)
        own = {"num_local_experts": experts, "num_experts_per_tok": chosen, **window}
        return "MixtralForCausalLM", decoder(told, gguf, "mixtral") | own
    if window["sliding_window"]:
        return "MistralForCausalLM", decoder(told, gguf, "mistral") | window
    return "LlamaForCausalLM", decoder(told, gguf, "llama") | biases(gguf)


def _ministral3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Queries grow with their position, from the length on that the rotation was stretched from."""
    no_experts(told)
    found, growth = decoder(told, gguf, "ministral3"), told.number("attention.temperature_scale")
    scaling = found.pop("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        raise told.refused("attention.temperature_scale", "it needs rope.scaling.type yarn")
    weight = told.number("rope.scaling.yarn_log_multiplier", 0)
    weights = {"mscale": 1.0, "mscale_all_dim": weight} if weight else {}
    rope = scaling | weights | {"rope_theta": found.pop("rope_theta"), "llama_4_scaling_beta": growth}
    return "Ministral3ForCausalLM", found | {"sliding_window": None, "rope_parameters": rope}


def _qwen2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Qwen2ForCausalLM", decoder(told, gguf, "qwen2") | {"use_sliding_window": False}


def _qwen3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Qwen3ForCausalLM", decoder(told, gguf, "qwen3")


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
    found = decoder(told, gguf, model_type, theta)
    del found["hidden_act"]
    layers, size = found["num_hidden_layers"], found["head_dim"]
    window = told.count("attention.sliding_window", 4096 if model_type == "gemma2" else ...)
    scale = told.number("attention.scale", 0)
    per_head = found["hidden_size"] // found["num_attention_heads"] if layers == largest else size
    return found | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale**-2 if scale else per_head,
        **windows(told, layers, period, window),
    }


def _gemma1(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "GemmaForCausalLM", decoder(told, gguf, "gemma") | {"hidden_act": "gelu_pytorch_tanh"}


def _phi3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    found = decoder(told, gguf, "phi3")
    window, scaling = told.count("attention.sliding_window", 0), found.get("rope_scaling", {})
    original = scaling.get("original_max_position_embeddings", told("rope.scaling.original_context_length", 0))
    no_experts(told)
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
    no_experts(told)
    return "GraniteForCausalLM", decoder(told, gguf, "granite") | biases(gguf) | mixtures.granite_factors(told)


def _olmo2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Also OLMo 3, which has windows, and whose layers with one are never stretched."""
    found, window = decoder(told, gguf, "olmo2"), told.count("attention.sliding_window", 0)
    if not window:
        return "Olmo2ForCausalLM", found
    theta, scaling = found.pop("rope_theta"), found.pop("rope_scaling", {})
    local = told.number("rope.freq_base_swa", theta)
    return "Olmo3ForCausalLM", found | windows(told, found["num_hidden_layers"], 4, window) | {
        "model_type": "olmo3",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": theta} | scaling,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _arcee(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "ArceeForCausalLM", decoder(told, gguf, "arcee") | biases(gguf) | {"hidden_act": "relu2"}


def _seed_oss(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    own = {"attention_bias": False, "attention_out_bias": False}
    own |= biases(gguf, attention_bias="attn_q", attention_out_bias="attn_output", mlp_bias="ffn_up")
    return "SeedOssForCausalLM", decoder(told, gguf, "seed_oss") | own


def _exaone4(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Only layers with a window are rotated, where there are such: in 32B, which llama.cpp knows by its layers."""
    found = decoder(told, gguf, "exaone4")
    layers, theta = found["num_hidden_layers"], found["rope_theta"]
    told.only("rope.freq_base_swa", theta, told("rope.freq_base", theta))
    window = told.count("attention.sliding_window", 4096 if layers == 64 else 0)
    if window:
        found |= windows(told, layers, 4, window)
    return "Exaone4ForCausalLM", found


def _starcoder2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """Its window is not told, and llama.cpp does without."""
    found = decoder(told, gguf, "starcoder2", eps="norm_epsilon")
    return "Starcoder2ForCausalLM", found | {
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in gguf.tensors or "blk.0.attn_qkv.bias" in gguf.tensors,
        "sliding_window": None,
    }


def _cohere2(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    found = decoder(told, gguf, "cohere2", eps="layer_norm_eps")
    theta, window = found["rope_theta"], told.count("attention.sliding_window")
    told.only("rope.freq_base_swa", theta, told("rope.freq_base", theta))
    own = windows(told, found["num_hidden_layers"], 4, window)
    return "Cohere2ForCausalLM", found | own | {"logit_scale": told.number("logit_scale")}


def _ernie(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "Ernie4_5ForCausalLM", decoder(told, gguf, "ernie4_5")


def _hunyuan(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    """The base of its rotation is told as it was stretched."""
    return "HunYuanDenseV1ForCausalLM", decoder(told, gguf, "hunyuan_v1_dense")


def _smollm3(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    return "SmolLM3ForCausalLM", decoder(told, gguf, "smollm3") | biases(gguf) | {"no_rope_layer_interval": 4}


def _glm4(told: Told, gguf: Gguf) -> tuple[str, dict[str, Any]]:
    told.only("nextn_predict_layers", 0)
    return "Glm4ForCausalLM", {"partial_rotary_factor": 1.0} | decoder(told, gguf, "glm4") | biases(gguf)


READERS: dict[str, Callable[[Told, Gguf], tuple[str, dict[str, Any]]]] = {
    "llama": _llama,
    "arcee": _arcee,
    "mistral3": _llama,
    "qwen2": _qwen2,
    "qwen2moe": mixtures.qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": mixtures.qwen3_moe,
    "qwen3next": hybrids.qwen3_next,
    "qwen35": hybrids.qwen3_5,
    "qwen35moe": hybrids.qwen3_5_moe,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "granite": _granite,
    "granitemoe": mixtures.granite_moe,
    "olmo2": _olmo2,
    "olmoe": mixtures.olmoe,
    "smollm3": _smollm3,
    "glm4": _glm4,
    "glm4moe": mixtures.glm4_moe,
    "dots1": mixtures.dots1,
    "minimax-m2": mixtures.minimax_m2,
    "ernie4_5": _ernie,
    "ernie4_5-moe": mixtures.ernie_moe,
    "seed_oss": _seed_oss,
    "exaone4": _exaone4,
    "hunyuan-dense": _hunyuan,
    "cohere2": _cohere2,
    "starcoder2": _starcoder2,
    "deepseek": mixtures.deepseek,
    "deepseek2": mixtures.deepseek2,
    "gpt-oss": mixtures.gpt_oss,
    "granitehybrid": mamba.granite_hybrid,
    "nemotron_h": mamba.nemotron,
    "nemotron_h_moe": mamba.nemotron,
    "lfm2": hybrids.lfm2,
    "lfm2moe": hybrids.lfm2_moe,
}
