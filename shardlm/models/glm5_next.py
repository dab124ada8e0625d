"""GLM-5 Next (GLM-5.3 Flash; transformers' modeling_glm5_next.py is the definition), the part that reads text: three of
four layers are Kimi Delta Attention, whose decays have a bound, the others latent attention without rotation, to pools
of tokens that an indexer chooses; several streams, a few dense layers, then experts as DeepSeek V3's, with limits."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.pooled_indexer import PooledIndexerConfig
from shardlm.models import deepseek, hf_decoder, kimi_linear
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig

LINEAR, ATTENDS = "linear_attention", ("indexed_attention", "full_attention")
# Rotations that no layer has, sizes that repeat others, and modules that predict further tokens, which are left aside.
ASIDE = ("qk_head_dim", "num_key_value_heads", "rope_parameters", "rope_scaling", "rope_theta")
ASIDE += ("num_nextn_predict_layers", "num_mtp_layers", "index_topk_pattern", "index_topk_freq")
ASIDE += ("index_skip_topk_offset", "linear_attn_config")
LIMITED = "silu_of_cut"


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` glm5_next_text."""
    del length
    options.where_absent(routed_scaling_factor=2.5, norm_topk_prob=True, hidden_act="silu")
    known = {"attention_bias": False, "qk_rope_head_dim": 0, "moe_layer_freq": 1, "hidden_act": "silu"}
    for name, value in (known | {"index_kpool_always_select_tail": True}).items():
        options.only(name, value)
    limit = float(options("swiglu_limit", 10.0))
    if limit <= 0:
        raise ShardlmError(f"config.json has swiglu_limit={limit}; it needs a number above 0")
    norm, linear = hf_decoder.rms(options), _linear_layers(options)
    memory, latent = _memory(options, norm), _latent(options, norm)
    mixed, experts = deepseek.mixed_layers(options, first=3), deepseek.experts_of(options, third=True, normalize=True)
    experts = dataclasses.replace(experts, activation=LIMITED, limit=limit, shared_limit=limit)
    dense = MlpConfig(options("intermediate_size"), LIMITED, limit=limit)
    sizes = options("hc_mult", 4), options("hc_sinkhorn_iters", 20), float(options("hc_eps", 1e-6)), norm.eps
    streams = StreamsConfig(*sizes, plain_head=True)
    _of_each_layer(options, linear)
    for name in ASIDE:
        options(name, None)
    options.asked.add("head_dim")  # 0, as the size of the rotated part, which transformers writes there, is

    def block(layer: int) -> BlockConfig:
        return BlockConfig(memory if linear[layer] else latent, experts if mixed[layer] else dense, streams=streams)

    return hf_decoder.decoder(options, block, norm, streams=streams)


def _linear_layers(options: Options) -> list[bool]:
    """Which layers are linear attention: by `layer_types`, or all but every fourth."""
    layers, kinds = options("num_hidden_layers"), options("layer_types", None)
    if kinds is None:
        return [layer % 4 != 3 for layer in range(layers)]
    if len(kinds) != layers or not {LINEAR, *ATTENDS}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {LINEAR}, "
            f"{', '.join(ATTENDS)}"
        )
    return [kind == LINEAR for kind in kinds]


def _of_each_layer(options: Options, linear: list[bool]) -> None:
    """Refuses layers that attend to what another's indexer chose."""
    told, pattern = options("indexer_types", None), options("index_topk_pattern", None)
    every, first = max(options("index_topk_freq", 1) or 1, 1), options("index_skip_topk_offset", 2)
    if told is None and pattern is not None:
        told = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if told is None:
        told = ["shared" if max(layer - first + 1, 0) % every else "full" for layer in range(len(linear))]
    if len(told) != len(linear) or any(kind != "full" for kind, own in zip(told, linear, strict=True) if not own):
        raise ShardlmError(
            f"config.json has indexer_types={told!r}; it needs num_hidden_layers={len(linear)}, of layers that attend "
            "to tokens full: each chooses for itself"
        )


def _memory(options: Options, norm: NormConfig) -> DeltaNetConfig:
    told = options("linear_attn_config", None) or {}
    heads = told.get("num_heads", options("linear_num_heads", 64))
    width = told.get("head_dim", options("linear_head_dim", 128))
    conv = told.get("short_conv_kernel_size", options("linear_conv_kernel_dim", 4))
    bound = options.values.get("linear_lower_bound", -5.0)  # null: none
    options("linear_lower_bound", None)
    bound = told.get("gate_lower_bound", bound)
    if bound is None and told and told.get("safe_gate", True):
        bound = -5.0
    own = {"by_channel": True, "gate": "sigmoid", "least": float(bound or 0.0)}
    return DeltaNetConfig(heads, heads, width, width, conv, norm, **own)


def _latent(options: Options, norm: NormConfig) -> MlaConfig:
    sizes = options("index_n_heads", 32), options("index_head_dim", 128), options("index_topk", 2048)
    return MlaConfig(
        num_heads=options("num_attention_heads"),
        q_latent_dim=options("q_lora_rank"),
        kv_latent_dim=options("kv_lora_rank"),
        nope_dim=options("qk_nope_head_dim"),
        rope_dim=0,
        value_dim=options("v_head_dim"),
        rope=None,
        norm=norm,
        indexer=PooledIndexerConfig(*sizes, options("index_kpool", 16)),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    """As published."""
    found = deepseek.names(config, block)
    if isinstance(block.attention, MlaConfig):
        found |= _indexer_names()
    else:
        found |= (
            kimi_linear.memory_names()
            | kimi_linear.made_of_latents()
            | {"attention.log_rate": Tensor(f"{LAYER}self_attn.A_log")}
        )
    if isinstance(block.mlp, MoeConfig):
        found["mlp.router_bias"] = Tensor(f"{LAYER}mlp.gate.e_score_correction_bias")
    for ours, short in (("attention", "attn"), ("mlp", "ffn")):
        found[f"{ours}_streams.fn"] = Tensor(f"{LAYER}hc_{short}_fn", "S I -> I S")
        found[f"{ours}_streams.base"] = Tensor(f"{LAYER}hc_{short}_base")
        found[f"{ours}_streams.scale"] = Tensor(f"{LAYER}hc_{short}_scale")
    return found


def _indexer_names() -> Names:
    theirs = f"{LAYER}self_attn.indexer."
    return {
        "attention.indexer.wq": Tensor(f"{theirs}wq_b.weight", "(N H) Q -> Q N H"),
        "attention.indexer.wk": Tensor(f"{theirs}wk.weight", "H D -> D H"),
        "attention.indexer.wgate": Tensor(f"{theirs}index_kpool_compress_gate", "H D -> D H"),
        "attention.indexer.bias": Tensor(f"{theirs}index_kpool_compress_ape"),
        "attention.indexer.heads": Tensor(f"{theirs}weights_proj.weight", "N D -> D N"),
        "attention.indexer.k_norm.scale": Tensor(f"{theirs}k_norm.weight"),
        "attention.indexer.k_norm.bias": Tensor(f"{theirs}k_norm.bias"),
    }


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    return re.sub(r"\.self_attn\.(f_[ab]_proj)\.", r".self_attn.forget_gate.\1.", name)


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """The module that predicts a further token, which is a layer after the last."""
    return re.compile(rf"model\.layers\.({text['num_hidden_layers']}\.|\d+\.shared_head\.)")
