"""Runs of families whose layers are unlike others', a few layers as wide as published ones: for random_runs.py, which
compiles and records them. What a run does not give is as in the family's reference (tests/hf/references)."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from shardlm.models.pretrained import Pretrained

REFERENCES = pathlib.Path(__file__).parent.parent / "hf" / "references"
Settings = dict[str, Any]


def _of(reference: str, *by_layer: str) -> Callable[..., Pretrained]:
    """A family by its reference, without options that have a value for each layer of it; `kinds` has a letter for each
    layer."""
    names = {"C": "conv", "F": "full_attention", "S": "sliding_attention", "L": "linear_attention"}
    names |= {"B": "minimax_m3_sparse"}

    def made(kinds: str = "", **sizes) -> Pretrained:
        found = json.loads((REFERENCES / reference / "config.json").read_text())
        found = {name: value for name, value in found.items() if name not in by_layer}
        own = {"layer_types": [names[kind] for kind in kinds], "num_hidden_layers": len(kinds)} if kinds else {}
        return Pretrained("unread", config=json.dumps(found | {"max_position_embeddings": 65_536} | own | sizes))

    return made


MODELS = {
    "convolved": _of("lfm2"),
    "beside": _of("falcon_h1"),
    "straight": _of("bailing_hybrid", "mlp_layer_types"),
    "unmixed": _of("hy_v4", "layer_types", "mlp_layer_types", "indexer_types"),
    "faster": _of(
        "mistral_large4", "layer_types", "mlp_layer_types", "indexer_types", "kv_source_layers", "no_rope_layers"
    ),
    "predicted": _of("gemma3n"),
    "shortcut": _of("longcat_flash"),
    "lightning": _of("minimax", "layer_types"),
    "own blocks": _of("minimax_m3", "layer_types", "mlp_layer_types"),
    "pools": _of("glm5_next", "layer_types", "mlp_layer_types", "indexer_types"),
}
SERVED = {  # of which no training step is recorded
    "convolved experts": _of("lfm2_moe"),
    "gated": _of("lfm3"),
}
_LFM = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65_536}
_CONVOLVED = _LFM | {"kinds": "CCF" * 4, "intermediate_size": 8192, "block_auto_adjust_ff_dim": False}
_CONVOLVED |= {"conv_L_cache": 3}
_EXPERTS = _LFM | {"kinds": "CCFCCCFC", "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32}
_EXPERTS |= {"num_experts_per_tok": 4, "num_dense_layers": 2}
_GATED = _LFM | {"kinds": "CCFC" + "SCFC" * 2, "head_dim": 64, "intermediate_size": 8192, "sliding_window": 256}
_BESIDE = {"hidden_size": 3072, "num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128}
_BESIDE |= {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256, "mamba_n_groups": 1}
_BESIDE |= {"intermediate_size": 12_288, "num_hidden_layers": 8, "vocab_size": 65_536}
_LATENT = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512}
_LATENT |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "head_dim": 64}
_LATENT |= {"intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 32_768}
_STRAIGHT = _LATENT | {
    "kinds": "LLF" * 2,
    "first_k_dense_replace": 6,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "linear_num_heads": 16,
}
_STRAIGHT |= {"linear_head_dim": 128}
_SPARSE = _LATENT | {"n_routed_experts": 16, "num_experts_per_tok": 4, "index_n_heads": 16, "index_head_dim": 128}
_SPARSE |= {"index_topk": 1024}
_UNMIXED = _SPARSE | {"num_hidden_layers": 6, "q_lora_rank": 1024, "hc_mult": 4, "indexer_types": ["full"] * 6}
_UNMIXED |= {"first_k_dense_replace": 6}  # others have experts
_FASTER = _SPARSE | {"num_hidden_layers": 8, "indexer_types": ["full"] * 8, "first_k_dense_replace": 8}
_PREDICTED = {"hidden_size": 2048, "kinds": "SSSSF" * 2, "num_attention_heads": 8, "num_key_value_heads": 2}
_PREDICTED |= {"head_dim": 256, "intermediate_size": 8192, "vocab_size": 65_536, "vocab_size_per_layer_input": 65_536}
_PREDICTED |= {"hidden_size_per_layer_input": 256, "altup_num_inputs": 4, "laurel_rank": 64, "num_kv_shared_layers": 0}
_PREDICTED |= {"activation_sparsity_pattern": [0.0] * 10, "sliding_window": 512}
_SHORTCUT = _LATENT | {"num_layers": 4, "q_lora_rank": 1024, "ffn_hidden_size": 6144, "expert_ffn_hidden_size": 768}
_SHORTCUT |= {"n_routed_experts": 16, "zero_expert_num": 8, "moe_topk": 4}
_LIGHTNING = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
_LIGHTNING |= {"kinds": "LLLF", "intermediate_size": 1536, "num_local_experts": 8, "num_experts_per_tok": 2}
_LIGHTNING |= {"vocab_size": 32_768}
_BLOCKS = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64}
_BLOCKS |= {"kinds": "F" + "B" * 4, "mlp_layer_types": ["dense"] + ["sparse"] * 4, "dense_intermediate_size": 6144}
_BLOCKS |= {"intermediate_size": 768, "shared_intermediate_size": 768, "num_local_experts": 16, "vocab_size": 32_768}
_BLOCKS |= {"num_experts_per_tok": 4, "index_n_heads": 4, "index_head_dim": 128, "index_block_size": 128}
_BLOCKS |= {"index_topk_blocks": 8, "index_local_blocks": 1}
_POOLS = _LATENT | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 0, "qk_head_dim": 128, "head_dim": 0}
_POOLS |= {"kinds": "LF" * 2, "indexer_types": ["full"] * 4, "mlp_layer_types": ["sparse"] * 4, "hc_mult": 4}
_POOLS |= {"q_lora_rank": 1024, "n_routed_experts": 16, "num_experts_per_tok": 4, "index_n_heads": 16}
_POOLS |= {"index_head_dim": 128, "index_topk": 1024, "index_kpool": 16, "linear_num_heads": 16}
_POOLS |= {"linear_head_dim": 128}


def _run(
    model: str, sizes: dict, mesh: dict[str, int], rows: int, remat: str = "full", seq_len: int = 4096
) -> Settings:
    return {
        "model": model,
        "sizes": sizes,
        "mesh": mesh,
        "rules": "zero3",
        "remat": remat,
        "context_attention": "auto",
        "train": {"global_batch": rows, "seq_len": seq_len, "accumulation": 1},
        "pipeline": {"schedule": "circular", "rounds": 1},
    }


FSDP, TENSOR, CONTEXT = {"fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}
EXPERT = {"fsdp": 2, "expert": 2}
PICKED = {
    "convolved-fsdp": _run("convolved", _CONVOLVED, FSDP, 4),
    "convolved-tensor": _run("convolved", _CONVOLVED, TENSOR, 4),
    "convolved-context": _run("convolved", _CONVOLVED, CONTEXT, 4),
    "convolved-none": _run("convolved", _CONVOLVED, FSDP, 2, "none"),
    "convolved-experts": _run("convolved experts", _EXPERTS, EXPERT, 8),
    "gated-fsdp": _run("gated", _GATED, FSDP, 4),
    "beside-fsdp": _run("beside", _BESIDE, FSDP, 2),
    "beside-tensor": _run("beside", _BESIDE, TENSOR, 4),
    "straight-fsdp": _run("straight", _STRAIGHT, FSDP, 2, seq_len=2048),
    "straight-tensor": _run("straight", _STRAIGHT, TENSOR, 4, seq_len=2048),
    "unmixed-fsdp": _run("unmixed", _UNMIXED, FSDP, 2),
    "unmixed-tensor": _run("unmixed", _UNMIXED, TENSOR, 4),
    "faster-fsdp": _run("faster", _FASTER, FSDP, 2),
    "faster-tensor": _run("faster", _FASTER, TENSOR, 4),
    "predicted-fsdp": _run("predicted", _PREDICTED, FSDP, 2),
    "predicted-tensor": _run("predicted", _PREDICTED, TENSOR, 4),
    "shortcut-fsdp": _run("shortcut", _SHORTCUT, FSDP, 2),
    "shortcut-tensor": _run("shortcut", _SHORTCUT, TENSOR, 4),
    "shortcut-expert": _run("shortcut", _SHORTCUT, EXPERT, 4),
    "shortcut-context": _run("shortcut", _SHORTCUT, CONTEXT, 2),
    "lightning-fsdp": _run("lightning", _LIGHTNING, FSDP, 2),
    "lightning-tensor": _run("lightning", _LIGHTNING, TENSOR, 4),
    "lightning-expert": _run("lightning", _LIGHTNING, EXPERT, 4),
    "lightning-context": _run("lightning", _LIGHTNING, CONTEXT, 2),
    "own-blocks-fsdp": _run("own blocks", _BLOCKS, FSDP, 2),
    "own-blocks-tensor": _run("own blocks", _BLOCKS, TENSOR, 4),
    "own-blocks-expert": _run("own blocks", _BLOCKS, EXPERT, 4),
    "pools-fsdp": _run("pools", _POOLS, FSDP, 2),
    "pools-tensor": _run("pools", _POOLS, TENSOR, 4),
    "pools-expert": _run("pools", _POOLS, EXPERT, 4),
    "pools-context": _run("pools", _POOLS, CONTEXT, 2),
}
