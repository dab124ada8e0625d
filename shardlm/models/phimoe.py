"""Phi-3.5 MoE (https://arxiv.org/abs/2404.14219): a mixture in every layer whose experts are chosen one after the other
(SparseMixer), layer norms, biases of attention and head, longrope."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor, experts, layer_norms, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` phimoe."""
    options.where_absent(rope_theta=1_000_000.0)
    for name in ("input_jitter_noise", "hidden_dropout"):  # of training
        options(name, None)
    options.only("num_experts_per_tok", 2)
    mixture = MoeConfig(
        num_experts=options("num_local_experts", 16),
        top_k=2,
        expert_dim=options("intermediate_size"),
        router=Router("sparsemixer", jitter=float(options("router_jitter_noise", 0.01))),
        balance_loss=float(options("router_aux_loss_coef", 0.001)),
        activation=options.activation(),
    )
    rope, windows = _rope(options, length), hf_decoder.sliding(options, lambda layer: True)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(hf_decoder.attention(options, window=windows[layer], rope=rope), mixture)

    norm, head_bias = NormConfig("layer", options("rms_norm_eps", 1e-5)), bool(options("lm_head_bias", False))
    return hf_decoder.decoder(options, block, norm, head_bias=head_bias)


def _rope(options: Options, length: int) -> Rope:
    """Whose sines have a factor of their own beyond the original length. The long divisors are for rows beyond it, as
    in the publishers' code (transformers 5.24 takes the short ones there too)."""
    rope = rope_of(options, options("hidden_size") // options("num_attention_heads"), length=length)
    own = options("rope_parameters", None) or options("rope_scaling", None) or {}
    factor = own.get("long_mscale" if rope.length > rope.original_length else "short_mscale")
    if rope.kind == "default" or factor is None:
        return rope
    return dataclasses.replace(rope, magnitude=float(factor))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | experts("block_sparse_moe", gate="w1", up="w3", down="w2")
    found["head_bias"] = Tensor("lm_head.bias")
    return found | layer_norms(
        attention_norm=f"{LAYER}input_layernorm",
        mlp_norm=f"{LAYER}post_attention_layernorm",
        final_norm="model.norm",
    )
