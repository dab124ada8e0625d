"""MiniMax M2 (https://github.com/MiniMax-AI/MiniMax-M2): norms on all queries and all keys together, a rotation of half
of each head, and experts in every layer, chosen by sigmoids and a bias as DeepSeek V3's, without shared ones.
MiniMax-01 and M1 are models/minimax_01.py's."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, NUMBERED, Names, Tensor, experts, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` minimax_m2. Its modules that predict further tokens are not published, and windows have no effect in
    `transformers`."""
    for name, known in {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}.items():
        options.only(name, known)
    options.only("qk_norm_type", "per_layer")
    options.only("shared_intermediate_size", 0)
    options.only("sliding_window", None)
    if set(options("attn_type_list", [])) - {1}:  # 0: linear attention, as in MiniMax-01
        options.only("attn_type_list", [1] * options("num_hidden_layers"))
    unused = ("mlp_intermediate_size", "shared_moe_mode", "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    options.aside(*unused, *(f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp")))
    heads, head_dim = options("num_attention_heads"), options("head_dim", 0)
    partial = options("rotary_dim", 0) / (head_dim or options("hidden_size") // heads) or 1.0
    norm = hf_decoder.rms(options)
    attention = hf_decoder.attention(options, length, partial, bias=False, out_bias=False, qk_norm="all", norm=norm)
    mixture = MoeConfig(
        num_experts=options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        router=Router("sigmoid"),
        activation=options.activation(),
        load_bias=True,
    )
    block = BlockConfig(attention, mixture)
    return hf_decoder.decoder(options, lambda layer: block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    bias = Tensor(f"{LAYER}block_sparse_moe.e_score_correction_bias")
    return standard() | experts("block_sparse_moe", **NUMBERED) | {"mlp.router_bias": bias}
