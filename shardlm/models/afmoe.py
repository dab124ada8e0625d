"""Trinity (https://github.com/arcee-ai/trinity): norms before and after each layer and on the queries and keys of each
head, a gate on attention's output, sliding windows that are rotated between layers that see everything and are not, a
few dense layers, then experts as DeepSeek V3's."""

import dataclasses

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` afmoe."""
    # Of its first code; what transformers computes.
    options.only_all({"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1})
    options.aside("load_balance_coeff", "num_expert_groups", "num_limited_groups", "use_grouped_mm")
    norm, period = hf_decoder.rms(options), options("global_attn_every_n_layers", 4)
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % period != 0)
    usual = hf_decoder.attention(options, length, qk_norm="head", norm=norm, gate=True)
    dense, sparse = hf_decoder.mlp(options), _experts(options)
    first = options("num_dense_layers", 1)

    def attention(layer: int) -> AttentionConfig:
        return dataclasses.replace(usual, window=windows[layer], rope=usual.rope if windows[layer] else None)

    def feed_forward(layer: int) -> MlpConfig | MoeConfig:
        return sparse if layer >= first else dense

    scale = float(options("hidden_size")) ** 0.5 if options("mup_enabled", False) else 1.0
    block = lambda layer: BlockConfig(attention(layer), feed_forward(layer), norms="both")  # noqa: E731
    return hf_decoder.decoder(options, block, norm, embed_scale=scale)


def _experts(options: Options) -> MoeConfig:
    width = options("moe_intermediate_size")
    return MoeConfig(
        num_experts=options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width * options("num_shared_experts", 0),
        router=Router("sigmoid", scale=float(options("route_scale", 1.0))),
        activation=options.activation(),
        load_bias=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    norms = {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    }
    return {
        **deepseek.names(config, block),
        **{f"{ours}.scale": Tensor(f"{LAYER}{theirs}.weight") for ours, theirs in norms.items()},
        "attention.wg": dataclasses.replace(standard()["attention.wq"], name=f"{LAYER}self_attn.gate_proj.weight"),
        "mlp.router": Tensor(f"{LAYER}mlp.router.gate.weight", "E D -> D E"),
        "mlp.router_bias": Tensor(f"{LAYER}mlp.expert_bias"),
    }
