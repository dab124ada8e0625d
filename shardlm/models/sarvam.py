"""Sarvam 30B and 105B (https://huggingface.co/sarvamai): GLM-4.5's decoder with norms on queries and keys and whole
heads rotated, and DeepSeek V3's without a latent of queries."""

import dataclasses

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, fused
from shardlm.models.transformer_config import TransformerConfig

# As published, and as transformers computes them.
FIXED = {
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_rmsnorm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
}
# Of training and programs, and what other options tell.
ASIDE = ("embedding_dropout", "output_dropout", "norm_head", "router_dtype", "q_head_dim", "qk_head_dim")
ASIDE += ("attn_implementation", "base_model_tp_plan", "base_model_pp_plan")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` sarvam_moe and sarvam_mla."""
    options.where_absent(routed_scaling_factor=2.5)
    options.only_all(FIXED)
    options.aside(*ASIDE)
    experts = deepseek.experts_of(options, third=True, normalize=True)
    options.only("moe_shared_expert_intermediate_size", None, experts.shared_dim)
    attention = _latent if options("model_type") == "sarvam_mla" else _grouped
    own = attention(options, length)
    return deepseek.decoder(options, lambda layer: own, experts, first=1)


def _grouped(options: Options, length: int) -> AttentionConfig:
    options.where_absent(rope_theta=8_000_000.0)
    own = {"qk_norm": "head"} if options("use_qk_norm", True) else {}
    return hf_decoder.attention(options, length, norm=hf_decoder.rms(options), **own)


def _latent(options: Options, length: int):
    """The first checkpoints call yarn deepseek_yarn, and say the head's size otherwise."""
    options.aside("head_dim", "num_key_value_heads")
    rope = options.values.get("rope_scaling") or {}
    if "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")):
        options.values = {**options.values, "rope_scaling": {**rope, "rope_type": "yarn"}}
    return deepseek.latent(options, length)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block)
    own = block.attention
    if not isinstance(own, AttentionConfig):
        return found
    inside = f"{LAYER}attention."
    rows = {"q": own.num_heads * own.head_dim, "k": own.num_kv_heads * own.head_dim}
    sizes = {f"attention.w{letter}": rows.get(letter, rows["k"]) for letter in "qkv"}
    return {
        **found,
        **fused(found, f"{inside}query_key_value.weight", sizes),
        "embedding": Tensor("model.word_embeddings.weight"),
        "attention.wo": dataclasses.replace(found["attention.wo"], name=f"{inside}dense.weight"),
        "attention.q_norm.scale": Tensor(f"{inside}query_layernorm.weight"),
        "attention.k_norm.scale": Tensor(f"{inside}key_layernorm.weight"),
        "mlp.router_bias": Tensor(f"{LAYER}mlp.gate.expert_bias"),
    }
