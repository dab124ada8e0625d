"""Laguna (https://huggingface.co/poolside/Laguna-XS.2): norms on the queries and keys of each head, a softplus gate on
each head's output, layers with a window that may have more heads than others and a rotation of their own, a dense
layer, then experts as DeepSeek V3's."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router

# What checkpoints without rope_parameters mean.
ROPES = {"full_attention": (500_000.0, 0.5), "sliding_attention": (10_000.0, 1.0)}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` laguna."""
    options.only("moe_apply_router_weight_on_input", False)
    options.only("moe_router_logit_softcapping", 0.0, 0)
    options.only("gating", True, "per-head", "per-element")
    windows = hf_decoder.sliding(options, lambda layer: False)
    ropes = {windowed: _rope(options, windowed, length) for windowed in (True, False)}
    gates = {"gate": True, "gate_softplus": True, "gate_of_head": options("gating", True) != "per-element"}
    norm = {"qk_norm": "head", "norm": hf_decoder.rms(options)}
    usual = hf_decoder.attention(options, length, rope=None, **gates, **norm)
    heads = options("num_attention_heads_per_layer", [usual.num_heads] * len(windows))
    if len(heads) != len(windows):
        name = "num_attention_heads_per_layer"
        raise ShardlmError(f"config.json has {name}={heads!r}; it needs num_hidden_layers={len(windows)} of them")

    def attention(layer: int) -> AttentionConfig:
        own = {"window": windows[layer], "rope": ropes[windows[layer] > 0], "num_heads": heads[layer]}
        return dataclasses.replace(usual, **own)

    return deepseek.decoder(options, attention, _experts(options), first=1)


def _rope(options: Options, windowed: bool, length: int) -> Rope:
    kind = "sliding_attention" if windowed else "full_attention"
    if not options("rope_parameters", None):
        theta, share = ROPES[kind]
        return Rope(theta, dim=0 if share == 1 else int(options("head_dim") * share))
    return rope_of(options, options("head_dim"), kind, length)


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        shared_dim=options("shared_expert_intermediate_size", 0),
        router=Router("sigmoid", scale=float(options("moe_routed_scaling_factor", 1.0))),
        activation=options.activation(),
        load_bias=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = {**deepseek.names(config, block), "mlp.router_bias": Tensor(f"{LAYER}mlp.experts.e_score_correction_bias")}
    found |= {
        path: dataclasses.replace(tensor, name=tensor.name.replace("shared_experts", "shared_expert"))
        for path, tensor in found.items()
        if path.startswith("mlp.shared.")
    }
    return found | {"attention.wg": Tensor(f"{LAYER}self_attn.g_proj.weight", "(N H) D -> D N H")}
