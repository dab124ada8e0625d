"""Kolibri 1 (transformers' modeling_kolibri1.py is the definition): norms before and after each layer, windows whose
layers alone are rotated, and experts of which a bias beside logits chooses, weighted by sigmoids, with a shared one."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` kolibri1."""
    options.where_absent(head_dim=128, sliding_window=513)
    options("intermediate_size", None)  # of dense layers, of which there are none
    norm = hf_decoder.rms(options)
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % 5 != 0)
    usual = hf_decoder.attention(options, length, qk_norm="head", norm=norm)
    mixture = MoeConfig(
        num_experts=options("num_experts", 0) or options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=options("shared_expert_intermediate_size", 512),
        router=Router("sigmoid", normalize=bool(options("norm_topk_prob", False)), by_logits=True),
        activation=options.activation(),
        load_bias=True,
    )

    def block(layer: int) -> BlockConfig:
        rope = usual.rope if windows[layer] or not options("sliding_window", 0) else None
        attention = dataclasses.replace(usual, window=windows[layer], rope=rope)
        return BlockConfig(attention, mixture, norms="both")

    return hf_decoder.decoder(options, block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    norms = {
        "attention_post_norm": "post_attn_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_ffn_norm",
    }
    return {
        **deepseek.names(config, block),
        **{f"{ours}.scale": Tensor(f"{LAYER}{theirs}.weight") for ours, theirs in norms.items()},
        "mlp.router_bias": Tensor(f"{LAYER}moe.router.expert_bias"),
    }
