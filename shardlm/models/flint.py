"""Flint (transformers' modeling_flint.py is the definition): Qwen 3's mixture with sinks, windows whose layers alone
are rotated, experts chosen by sigmoids without a bias, and a shared one without a gate."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, experts, linear, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` flint."""
    options.where_absent(head_dim=128, sliding_window=513, norm_topk_prob=True, mlp_only_layers=[0, 1])
    norm, last = hf_decoder.rms(options), options("num_hidden_layers") - 1
    windows = hf_decoder.sliding(options, lambda layer: not (layer < 2 or layer % 4 == 1 or layer == last))
    usual = hf_decoder.attention(options, length, qk_norm="head", norm=norm, sinks=True, out_bias=False)
    sparse, plain, step = _experts(options), options("mlp_only_layers", [0, 1]), options("decoder_sparse_step", 1)
    routed = [layer not in plain and (layer + 1) % step == 0 for layer in range(last + 1)]
    dense = None if all(routed) else hf_decoder.mlp(options)
    options("intermediate_size", None)  # of which a model of experts alone makes no use

    def block(layer: int) -> BlockConfig:
        rope = usual.rope if windows[layer] else None
        attention = dataclasses.replace(usual, window=windows[layer], rope=rope)
        return BlockConfig(attention, sparse if routed[layer] else dense)

    return hf_decoder.decoder(options, block, norm)


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_experts", 0) or options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=options("shared_expert_intermediate_size", 1024),
        router=Router("sigmoid", normalize=bool(options("norm_topk_prob"))),
        balance_loss=float(options("router_aux_loss_coef", 0.0005)),
        activation=options.activation(),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | {"attention.sinks": Tensor(f"{LAYER}self_attn.softmax_offset")}
    return found | (shared_names() if isinstance(block.mlp, MoeConfig) else {})


def shared_names() -> Names:
    """Experts beside a shared one without a gate."""
    found = experts("mlp")
    for name, kind in (("gate", "into"), ("up", "into"), ("down", "out")):
        found |= linear(f"mlp.shared.{name}", f"{LAYER}mlp.shared_expert.{name}_proj", kind)
    return found


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    return name.replace(".softmax_offset", ".sinks")
