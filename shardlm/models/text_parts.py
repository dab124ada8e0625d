"""The language models inside checkpoints that also see: which of their options are the text's, and what it is called
where it is written alone."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
# model_type of what speaks too -> of its part that reads: "thinker_config", which is published by itself also.
OMNI = {"qwen2_5_omni": "qwen2_5_omni_thinker", "qwen3_omni_moe": "qwen3_omni_moe_thinker"}
# model_type of all -> that of the text, as which it is read; "": what text_config says.
SEEING = {
    "aya_vision": "",
    "cohere2_vision": "",
    "deepseek_vl": "",
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm46v": "",
    "glm_ocr": "glm_ocr_text",
    "glm5_next": "glm5_next_text",
    "idefics3": "",
    "internvl": "",
    "janus": "",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "",
    "lighton_ocr": "",
    "llama4": "llama4_text",
    "llava": "",
    "llava_next": "",
    "llava_onevision": "",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "",
    "muse_glimmer": "muse_glimmer_text",
    "ovis2": "",
    "paddleocr_vl": "llama",
    "paligemma": "",
    "mistral_large4": "mistral_large4_text",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    **dict.fromkeys(("qwen2_5_omni", OMNI["qwen2_5_omni"]), "qwen2"),
    **dict.fromkeys(("qwen3_omni_moe", OMNI["qwen3_omni_moe"]), "qwen3_moe"),
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "smolvlm": "",
    "step3p7": "step3p5",
}
# Of which the text is another family's, but for its axes.
AS_ALONE = {"glm4v_text": "glm4", "glm4v_moe_text": "glm4_moe", "glm_ocr_text": "glm4"}
# Where text_config says none.
USUAL = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "glm46v": "glm4v_text",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "ovis2": "qwen2",
    "paligemma": "gemma",
    **dict.fromkeys(("deepseek_vl", "idefics3", "janus", "llava", "llava_next", "smolvlm"), "llama"),
}
# Whose heads repeat the embedding as is said of all, and where nothing is.
TIED = dict.fromkeys(("aya_vision", "cohere2_vision", "deepseek_vl", "janus", "lfm2_vl", "lighton_ocr"), True)
TIED |= dict.fromkeys(("ovis2", "paddleocr_vl", "paligemma"), True) | dict.fromkeys(("glm46v", *OMNI.values()), False)
ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm5_next_text": "Glm5NextTextModel",
    "gpt_oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minimax_m3_vl_text": "MiniMaxM3VLForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4_text": "MistralLarge4TextModel",
    "muse_glimmer_text": "MuseGlimmerTextModel",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
}
# What the published text_config of Gemma 3's larger checkpoints leaves to the defaults of transformers.
GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 131_072,
}
# The same of checkpoints whose text is another family's, which older versions of transformers wrote so: by that family.
SIZES = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}
OF_GEMMA = {"num_attention_heads": 8, "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
OF_GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "vocab_size": 257_152}
LEFT_OUT = {
    "gemma": OF_GEMMA
    | {"hidden_size": 2048, "num_hidden_layers": 18, "intermediate_size": 16_384, "num_key_value_heads": 1}
    | {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": OF_GEMMA
    | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "llama": SIZES | {"vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 2048},
    "mistral": SIZES
    | {"vocab_size": 32_000, "intermediate_size": 14_336, "num_key_value_heads": 8, "sliding_window": 4096}
    | {"max_position_embeddings": 131_072},
    "qwen2": SIZES | {"vocab_size": 151_936, "intermediate_size": 22_016, "max_position_embeddings": 32_768},
}
# Of PaddleOCR-VL, which is ERNIE 4.5 but for how heads are turned: what it leaves out, and what changes nothing.
PADDLE = {"head_dim": 128, "rope_theta": 500_000.0}
OF_PADDLE = ("compression_ratio", "ignored_index", "rope_is_neox_style", "use_3d_rope", "weight_share_add_bias")
WITH_OTHERS = ("deepseek_vl", "idefics3", "internvl", "janus", "llava", "llava_next", "llava_onevision")
WITH_OTHERS += ("ovis2", "paligemma", "smolvlm")
OF_AXES = ("mrope_section", "mrope_interleaved")
# Whose pairs belong to the three axes in turn, and how many to each where config.json does not say.
IN_TURN = dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", OMNI["qwen3_omni_moe"]), (24, 20, 20)) | dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe", "qwen4_exp"), (11, 11, 10)
)
OF_PALIGEMMA = ("num_image_tokens", "use_bidirectional_attention")
# What texts of models that also speak say and no layer has: whatever it is (None), or as it is.
OF_OMNI = {"init_std": None, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
OF_BOTH = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version")
TOKENS = tuple(f"{name}_token_id" for name in ("image", "video", "vision", "vision_start", "vision_end"))
# The last are Idefics 3's, which stand in its text_config.
IDEFICS = ("perceiver_config", "pixel_shuffle_factor", "use_resampler", "_flash_attn_2_enabled", "is_composition")
OF_PICTURES = frozenset(["vision_config", "text_config", *TOKENS, *IDEFICS])


def thinker(config: Config) -> Config:
    """Of a config.json the part that reads texts and images: `config` itself, or inside one of what speaks too."""
    kind = config.get("model_type")
    inner = config.get("thinker_config")
    if kind not in OMNI or not isinstance(inner, Mapping):
        return config
    return {name: config[name] for name in OF_BOTH if name in config} | dict(inner) | {"model_type": OMNI[kind]}


def text_config(config: Config) -> Config:
    """The language model's options, as those of one alone: `config` itself, or inside one that also sees."""
    config = thinker(config)
    kind = config.get("model_type")
    if kind not in SEEING or (kind == "gemma3" and "text_config" not in config):
        return config
    inner = config.get("text_config") or config  # Qwen 2's first checkpoints have all side by side
    found = GEMMA3 if kind == "gemma3" else _left_out(inner, USUAL[kind]) if kind in WITH_OTHERS else {}
    found = found | {name: config[name] for name in OF_BOTH if config.get(name) is not None}
    found |= {name: value for name, value in inner.items() if value is not None and name not in OF_PICTURES}
    found["model_type"] = SEEING[kind] or found.get("model_type", USUAL[kind])
    for name in ("rope_scaling", "rope_parameters"):
        if found.get(name):
            found[name] = _of_axes(kind, found[name])
    if found["model_type"] in AS_ALONE:
        found = _of_glm(found)
    if kind == "paddleocr_vl":
        found = PADDLE | {name: value for name, value in found.items() if name not in OF_PADDLE}
    if kind == "paligemma":  # whose prompts see themselves, which is its sight's (vision/paligemma.py)
        found = {name: value for name, value in found.items() if name not in OF_PALIGEMMA}
    if kind in OMNI.values():
        found = {name: value for name, value in found.items() if OF_OMNI.get(name, ...) not in (value, None)}
    if kind in ("qwen3_vl_moe", OMNI["qwen3_omni_moe"]):
        found["norm_topk_prob"] = True  # in transformers always, said or not
    if (tied := _tied(kind, config, inner)) is not None:
        found["tie_word_embeddings"] = tied
    found.pop("architectures", None)
    return found


def _left_out(inner: Config, usual: str) -> Config:
    """What a text_config leaves to the defaults of its family, `usual` where it does not say which; a null is said."""
    own = LEFT_OUT.get(inner.get("model_type", usual), {})
    if inner.get("rope_parameters"):
        own = {name: value for name, value in own.items() if name != "rope_theta"}
    return {name: value for name, value in own.items() if name not in inner}


def alone(config: Config) -> Config:
    """config.json of the language model where it is written without what sees: one that transformers opens."""
    if config.get("model_type") not in SEEING:
        return config
    found = text_config(config)  # a thinker's too
    for name in ("rope_scaling", "rope_parameters"):
        if found.get(name):
            found |= {name: {key: value for key, value in found[name].items() if key not in OF_AXES}}
    return {"architectures": [ARCHITECTURES[found["model_type"]]], **found}


def _of_axes(kind: str, rope: Config) -> Config:
    """Rotations of several axes (https://arxiv.org/abs/2409.12191, section 2.1). Without pictures positions are equal
    on all of them, and they are the usual ones."""
    found = dict(rope) | {name: "default" for name in ("type", "rope_type") if rope.get(name) == "mrope"}
    if kind in IN_TURN:  # always, said or not
        found |= {"mrope_interleaved": True, "mrope_section": rope.get("mrope_section", IN_TURN[kind])}
        found.pop("interleaved", None)  # the same, as Qwen3-Omni has it
    return found


def _of_glm(text: Config) -> Config:
    """What transformers has in GLM's texts beside pictures, said or not: biases, all of a head turned where no part is
    said, and the pairs of each axis."""
    kind = text["model_type"]
    found = dict(text) | {"model_type": AS_ALONE[kind]}
    if kind == "glm4v_moe_text":
        found.setdefault("attention_bias", True)
    else:
        found["attention_bias"] = kind == "glm4v_text"
        found.setdefault("partial_rotary_factor", 1.0)
    name = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
    found[name] = {"type": "default", "mrope_section": (8, 12, 12), **(found.get(name) or {})}
    return found


def _tied(kind: str, config: Config, inner: Config) -> bool | None:
    """Whether the output head repeats the embedding, which is said of all, of the text, or of neither (None), and not
    always alike: as transformers decides, but for Mistral, whose default for all is not what its checkpoints are."""
    whole, text = config.get("tie_word_embeddings"), inner.get("tie_word_embeddings")
    if kind in TIED:
        return next((config[name] for name in ("tie_embedding", "tie_word_embeddings") if name in config), TIED[kind])
    if kind in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe", "glm_ocr"):
        return bool(whole or text)
    first, second = (text, whole) if kind in ("mistral3", "gemma3", *USUAL) else (whole, text)
    return second if first is None else first
