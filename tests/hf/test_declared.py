"""What published checkpoints' config.json say of single weights: lists as their makers wrote them."""

import pytest

from shardlm.errors import ShardlmError
from shardlm.hf_quantised import kept_as

L = "model.layers.3."
Q, GATE, ROUTER = f"{L}self_attn.q_proj", f"{L}mlp.gate_proj", f"{L}mlp.gate"
EXPERT, SHARED, DELTA = f"{L}mlp.experts.7.up_proj", f"{L}mlp.shared_experts.up_proj", f"{L}linear_attn.out_proj"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compressed(ignore=("lm_head",), targets=("Linear",), **weights):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "actorder": None} | weights
    group = {"targets": list(targets), "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": list(ignore)}


def modelopt(algorithm, **more):
    return {"quant_method": "modelopt", "quant_algo": algorithm, **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
THINKING = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
DYNAMIC = {"lm_head": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}
MIXED = {
    "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
    "model.language_model.layers.3.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
}
LLAMA_405B = [f"model.layers.{n}.self_attn.{name}_proj" for n in range(126) for name in "qkvo"]
PUBLISHED = {
    "DeepSeek-V3": (BLOCKS, {Q: ("fp8", 128), EXPERT: ("fp8", 128), SHARED: ("fp8", 128), f"{L}eh_proj": None}),
    "MiniMax-M2": (
        BLOCKS | {"modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        {f"{L}block_sparse_moe.gate": None, GATE: ("fp8", 128), f"{L}block_sparse_moe.experts.1.w1": ("fp8", 128)},
    ),
    "Qwen3-30B-A3B-FP8": (
        BLOCKS | {"modules_to_not_convert": ["lm_head", f"{L}input_layernorm", ROUTER]},
        {ROUTER: None, GATE: ("fp8", 128), EXPERT: ("fp8", 128)},
    ),
    "a first layer alone": (
        BLOCKS | {"modules_to_not_convert": ["model.layers.3"]},
        {Q: None, "model.layers.30.self_attn.q_proj": ("fp8", 128)},
    ),
    "Llama-3.1-405B-FP8 by Meta": (
        {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [*LLAMA_405B, "model.layers.0.mlp.gate_proj"]},
        {Q: None, GATE: ("fp8", 0), "model.layers.0.mlp.gate_proj": None},
    ),
    "Llama-3.3-70B-FP8-dynamic": (compressed(), {Q: ("fp8", 0), GATE: ("fp8", 0)}),
    "Llama-3.1-8B-quantized.w4a16": (
        compressed(**INT4 | {"group_size": 128, "actorder": "weight"}),
        {Q: ("int4", 128), GATE: ("int4", 128)},
    ),
    "one whose inputs were sorted": (compressed(**INT4 | {"actorder": "group"}), {Q: ("", 0)}),
    "Kimi-K2-Thinking": (
        compressed(THINKING, **INT4),
        {Q: None, GATE: None, SHARED: None, EXPERT: ("int4", 32)},
    ),
    "one that also sees": (
        compressed(["re:language_model.model.layers.3.self_attn.*", "language_model.lm_head"], **INT4),
        {Q: None, EXPERT: ("int4", 32)},
    ),
    "experts alone": (
        compressed(targets=[r"re:.*layers\.\d+\.mlp\.experts\..*"], type="int", num_bits=8),
        {Q: None, EXPERT: ("int8", 0)},
    ),
    "blocks by their name": (
        compressed(strategy="block", block_structure="128x64"),
        {Q: ("fp8", 64)},
    ),
    "caches alone": (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
        {Q: None},
    ),
    "gpt-oss": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
        {Q: None, f"{L}mlp.experts.gate_up_proj": ("fp4", 32), f"{L}mlp.router": None},
    ),
    "gpt-oss's list in NVFP4": (
        modelopt("NVFP4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router"]),
        {Q: None, GATE: ("fp4", 16)},
    ),
    "Qwen3-235B-A22B-NVFP4": (modelopt("NVFP4", exclude_modules=["lm_head", ROUTER]), {EXPERT: ("fp4", 16)}),
    "GLM-NVFP4": (
        modelopt("NVFP4", ignore=["model.language_model.layers.3.self_attn*", "*.mlp.shared_experts*"]),
        {Q: None, SHARED: None, EXPERT: ("fp4", 16)},
    ),
    "Qwen3.5-397B-NVFP4-V2": (
        modelopt("MIXED_PRECISION", quantized_layers=MIXED, ignore=["mtp*"]),
        {Q: ("fp8", 0), EXPERT: ("fp4", 16), SHARED: None, DELTA: None},
    ),
    "Qwen3.5-GPTQ-Int4": (GPTQ | {"dynamic": DYNAMIC}, {Q: None, DELTA: None, SHARED: None, EXPERT: ("int4", 128)}),
    "GPTQModel's with bits of their own": (
        GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8, "group_size": 64}}},
        {Q: ("int4", 128), f"{L}mlp.down_proj": ("int8", 64)},
    ),
    "Qwen1.5-MoE-GPTQ": (
        GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts.7.up_proj"]]},
        {Q: ("int4", 128), EXPERT: ("int4", 128), DELTA: None},
    ),
    "sorted": (GPTQ | {"desc_act": True}, {Q: ("", 0)}),
    "Mixtral-8x7B-AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["gate"]},
        {f"{L}block_sparse_moe.experts.1.w1": ("int4", 128), GATE: None},
    ),
    "AutoRound": (
        {
            **GPTQ,
            "quant_method": "auto-round",
            "block_name_to_quantize": "model.layers",
            "extra_config": {Q: {"bits": 16}, r"model\.layers\.3\.mlp\.gate.*": {"bits": 8}},
        },
        {Q: None, GATE: ("int8", 128), EXPERT: ("int4", 128), "mtp.layers.0.mlp.up_proj": None},
    ),
    "DeepSeek V4": (
        BLOCKS | {"expert_dtype": "fp4"},
        {Q: ("fp8", 128), EXPERT: ("fp4", 32), "layers.3.attn.compressor.wkv": None},
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {Q: ("", 0)}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_published_checkpoints(name):
    options, expected = PUBLISHED[name]
    kept_by = kept_as({"quantization_config": options})
    found = {module: kept_by(f"{module}.weight") for module in expected}
    assert {module: kept and kept[:2] for module, kept in found.items()} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (compressed(ignore=["re:*broken("]), r"pattern '\*broken\(', which is none"),
        (compressed(targets=["re:*broken("]), "a group with targets and weights is needed"),
        (GPTQ | {"dynamic": {"-:(": {}}}, r"pattern '\(', which is none"),
        (GPTQ | {"group_size": "128"}, "group_size='128'; it needs a whole number"),
    ],
)
def test_patterns_and_numbers_that_are_none(options, message):
    with pytest.raises(ShardlmError, match=message):
        kept_as({"quantization_config": options})(f"{Q}.weight")


def test_lists_of_another_form_name_nothing():
    assert kept_as({"quantization_config": BLOCKS | {"modules_to_not_convert": 5}})(f"{Q}.weight").numbers == "fp8"
    mixed = modelopt("MIXED_PRECISION", quantized_layers=[1])
    assert kept_as({"quantization_config": mixed})(f"{Q}.weight") is None
