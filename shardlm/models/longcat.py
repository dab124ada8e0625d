"""LongCat Flash (https://arxiv.org/abs/2509.01322): DeepSeek V3's attention, whose latents are scaled, twice a layer,
each time before a dense MLP; beside the first of them experts, of which some give back what they read, and which are
added behind the second. A layer of files is two here."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.shortcut import ShortcutConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router

KNOWN = {  # of its first code; what transformers computes
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "router_bias": False,
    "norm_topk_prob": False,
}
ASIDE = ("router_dtype", "moe_impl", "num_key_value_heads", "head_dim", "qk_head_dim", "num_nextn_predict_layers")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` longcat_flash."""
    options.where_absent(rope_theta=10_000_000.0, routed_scaling_factor=6.0, zero_expert_num=256, hidden_act="silu")
    for name, known in KNOWN.items():
        options.only(name, known)
    for name in ASIDE:
        options(name, None)
    layers, width = options("num_layers"), options("hidden_size")
    if type(layers) is not int or layers < 1:
        raise ShardlmError(f"config.json has num_layers={layers!r}; it needs a whole number of at least 1")
    options.values = {**options.values, "num_hidden_layers": 2 * layers}
    options("q_lora_rank")  # by which scores are scaled
    latent = deepseek.latent(options, length)
    of_queries = math.sqrt(width / latent.q_latent_dim)
    scale = (latent.scale or latent.head_dim**-0.5) * of_queries
    latent = dataclasses.replace(latent, scale=scale, latent_scale=math.sqrt(width / latent.kv_latent_dim))
    dense, mixture = MlpConfig(_size(options, "ffn_hidden_size", "intermediate_size")), _experts(options)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(latent, dense if layer % 2 else mixture, streams=ShortcutConfig())

    return hf_decoder.decoder(options, block, hf_decoder.rms(options), streams=ShortcutConfig())


def _size(options: Options, *names: str) -> int:
    """By the first of the names that config.json has."""
    return next(filter(None, [options(name, None) for name in names]), None) or options(names[0])


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=_size(options, "n_routed_experts", "num_local_experts"),
        top_k=_size(options, "moe_topk", "num_experts_per_tok"),
        expert_dim=_size(options, "expert_ffn_hidden_size", "moe_intermediate_size"),
        shared_dim=_size(options, "ffn_hidden_size", "intermediate_size"),
        router=Router("softmax", normalize=False, scale=float(options("routed_scaling_factor"))),
        activation=options.activation(),
        load_bias=True,
        idle=options("zero_expert_num", 0),
        later=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    first = isinstance(block.mlp, MoeConfig)
    which = 0 if first else 1
    numbers = tuple(layer // 2 for layer in range(config.num_layers))
    found = deepseek.names(config, block) | {
        "mlp.router": Tensor(f"{LAYER}mlp.router.classifier.weight", "E D -> D E"),
        "mlp.router_bias": Tensor(f"{LAYER}mlp.router.e_score_correction_bias"),
    }
    for path, tensor in found.items():
        name = _named(tensor.name, which)
        if path.startswith("mlp.shared."):
            name = name.replace(".mlp.shared_experts.", f".mlps.{which}.")
        elif path.startswith("mlp.") and not first:
            name = name.replace(".mlp.", f".mlps.{which}.")
        found[path] = dataclasses.replace(tensor, name=name, numbers=numbers if "{layer}" in name else ())
    return found


def unused(text: Mapping[str, Any]) -> re.Pattern | None:
    """Of experts that give back what they read, which transformers writes nonetheless."""
    experts = next(filter(None, map(text.get, ("n_routed_experts", "num_local_experts"))), 0)
    numbers = "|".join(str(experts + idle) for idle in range(text.get("zero_expert_num") or 0))
    return re.compile(rf"model\.layers\.\d+\.mlp\.experts\.({numbers})\.") if numbers else None


def _named(name: str, which: int) -> str:
    """With the number of a layer's two."""
    for module in ("self_attn", "input_layernorm", "post_attention_layernorm"):
        name = name.replace(f".{module}.", f".{module}.{which}.")
    return name
