"""Ling 3 (transformers' modeling_bailing_hybrid.py is the definition): five of six layers are Kimi Delta Attention,
whose decays and gates are made of the stream straight; the others latent attention with a gate of each head; a few
dense layers, then experts as DeepSeek V3's."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlm.layers.block import BlockConfig
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.kimi_linear import experts_of, memory_names
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.qwen_hybrid import linear_layers
from shardlm.models.transformer_config import TransformerConfig

# Of training and of modules that predict further tokens, which are left aside; sizes that repeat others.
ASIDE = ("model_max_length", "mtp_loss_scaling_factor", "num_nextn_predict_layers", "num_key_value_heads")
ASIDE += ("qk_head_dim",)


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` bailing_hybrid."""
    options.where_absent(topk_group=4)
    options.only("attention_bias", False)
    options.only("hidden_act", "silu")
    options.aside(*ASIDE)
    linear, memory = _linear_layers(options), _memory(options)
    latent = dataclasses.replace(deepseek.latent(options, length), gate="head")
    mixed = deepseek.mixed_layers(options, first=2)
    dense, sparse = MlpConfig(options("intermediate_size")), experts_of(options, usual_groups=8, usual_scale=2.5)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(memory if linear[layer] else latent, sparse if mixed[layer] else dense)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options))


def _linear_layers(options: Options) -> list[bool]:
    """Which layers are linear attention."""
    layers, group = options("num_hidden_layers"), options("layer_group_size", 6)
    if options("layer_types", None) is None:
        return [(layer + 1) % group > 0 for layer in range(layers)]
    return linear_layers(options)


def _memory(options: Options) -> DeltaNetConfig:
    """As published, or as transformers writes them, whose head_dim is that of latent attention's rotation."""
    heads, width = options("num_attention_heads"), options("head_dim", 128)
    heads, width = options("linear_num_heads", heads), options("linear_head_dim", width)
    conv = options("linear_conv_kernel_dim", options("short_conv_kernel_size", 4))
    bounded, least = bool(options("kda_safe_gate", True)), float(options("kda_lower_bound", -5.0))
    norm = hf_decoder.rms(options)
    own = {"by_channel": True, "straight": True, "gate": "sigmoid", "least": least if bounded else 0.0}
    return DeltaNetConfig(heads, heads, width, width, conv, norm, **own)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block) | {
        "embedding": Tensor("model.word_embeddings.weight"),
        "mlp.router_bias": Tensor(f"{LAYER}mlp.gate.expert_bias"),
        "attention.wg": Tensor(f"{LAYER}self_attn.g_proj.weight", "(N H) D -> D N H"),
    }
    if not isinstance(block.attention, MlaConfig):
        found |= memory_names() | {
            "attention.decay": Tensor(f"{LAYER}self_attn.f_proj.weight", "(N H) D -> D N H"),
            "attention.log_rate": Tensor(f"{LAYER}self_attn.A_log"),
        }
    return {path: dataclasses.replace(tensor, name=_published(tensor.name)) for path, tensor in found.items()}


def _published(name: str) -> str:
    return name.replace(".self_attn.o_proj.", ".attention.dense.").replace(".self_attn.", ".attention.")


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    name = name.replace(".attention.dense.", ".self_attn.o_proj.").replace(".attention.", ".self_attn.")
    return name.replace(".self_attn.f_proj.", ".self_attn.forget_gate.f_proj.")


def unused(text: Mapping[str, Any]) -> re.Pattern | None:
    """Modules that predict further tokens, which are layers after the last."""
    first, count = text["num_hidden_layers"], text.get("num_nextn_predict_layers") or 0
    numbers = "|".join(map(str, range(first, first + count)))
    return re.compile(rf"model\.layers\.({numbers})\.") if count else None
