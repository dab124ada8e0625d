"""Hunyuan dense (https://github.com/Tencent-Hunyuan/Hunyuan-7B): Llama's decoder with norms on the queries and keys of
each head after the rotation, whose base is stretched once and for all. Hunyuan A13B
(https://github.com/Tencent-Hunyuan/Hunyuan-A13B): the same with experts in every layer, beside a shared one. Hy 3: the
norms before the rotation, a dense layer, then experts as DeepSeek V3's."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor, experts, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope

SWITCHES = {"use_mixed_mlp_moe": True, "use_mla": False, "moe_layer_num_skipped": 0, "norm_type": "rms"}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` hunyuan_v1_dense, hunyuan_v1_moe and hy_v3."""
    if options("model_type") == "hy_v3":
        return _third(options, length)
    options.only("use_qk_norm", True)
    options.only("use_cla", False)
    options("eod_token_id", None), options("attention_head_dim", None)  # a name for head_dim
    norm = hf_decoder.rms(options)
    own = {"qk_norm": "head", "norm_rotated": True, "norm": norm, "rope": _rope(options, length)}
    mixed = options("model_type") == "hunyuan_v1_moe"
    feed_forward = _experts(options) if mixed else hf_decoder.mlp(options)
    block = BlockConfig(hf_decoder.attention(options, **own), feed_forward)
    return hf_decoder.decoder(options, lambda layer: block, norm)


def _experts(options: Options) -> MoeConfig:
    """Numbers may be said once for each layer; `transformers` knows experts as wide as the shared one alone."""
    for name in SWITCHES:
        options.only(name, SWITCHES[name])
    # Of training; of texts.
    options.aside("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "sep_token_id")
    width, layers = options("intermediate_size"), options("num_hidden_layers")
    options.only("num_shared_expert", 1, [1] * layers)
    if _of_all(options, "moe_intermediate_size", usual=width) != width:
        options.only("moe_intermediate_size", width)
    return MoeConfig(
        num_experts=_of_all(options, "num_experts"),
        top_k=_of_all(options, "moe_topk", "num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width,
        activation=options.activation(),
    )


def _of_all(options: Options, *names: str, usual: int | None = None) -> int:
    """A number that is the same for all layers, by the first of these names that is there."""
    found = next((options.values[name] for name in names if options.values.get(name) is not None), usual)
    if found is None:
        return options(names[0])
    options.asked.update(names)
    each = found if isinstance(found, list) else [found]
    if len(set(each)) != 1:
        raise ShardlmError(f"config.json has {names[0]}={found!r}; supported: the same for all layers")
    return each[0]


def _third(options: Options, length: int) -> TransformerConfig:
    options("enable_moe_fp32_combine", None)  # of the rounding of one sum
    options("num_nextn_predict_layers", 0)  # modules that predict further tokens, which are left out
    attention = hf_decoder.attention(options, length, qk_norm="head", norm=hf_decoder.rms(options))
    experts = deepseek.experts_of(options, third=True, normalize=True)
    return deepseek.decoder(options, lambda layer: attention, experts, first=1)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    if block.attention.qk_norm == "head" and not block.attention.norm_rotated:
        return _names_of_third(config, block)
    norms = {"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"}
    found = standard(**norms)
    if not isinstance(block.mlp, MoeConfig):
        return found
    shared = {
        f"mlp.shared.{part}": dataclasses.replace(
            found[f"mlp.{part}"], name=f"{LAYER}mlp.shared_mlp.{part}_proj.weight"
        )
        for part in ("gate", "up", "down")
    }
    return found | shared | experts("mlp") | {"mlp.router": Tensor(f"{LAYER}mlp.gate.wg.weight", "E D -> D E")}


def _names_of_third(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block)
    if not isinstance(block.mlp, MoeConfig):
        return found
    shared = {
        path: dataclasses.replace(tensor, name=tensor.name.replace("shared_experts", "shared_mlp"))
        for path, tensor in found.items()
        if path.startswith("mlp.shared.")
    }
    router = Tensor(f"{LAYER}mlp.router.gate.weight", "E D -> D E")
    return found | shared | {"mlp.router": router, "mlp.router_bias": Tensor(f"{LAYER}mlp.expert_bias")}


def _rope(options: Options, length: int) -> Rope:
    """What is called dynamic and has an alpha does not depend on the length."""
    head_dim = options("head_dim", 0) or options("hidden_size") // options("num_attention_heads")
    scaling = options("rope_parameters", {}) or options("rope_scaling", {})
    alpha = scaling.get("alpha")
    if not alpha or scaling.get("rope_type", scaling.get("type")) != "dynamic":
        return rope_of(options, head_dim, length=length)
    theta = options("rope_theta", 0) or scaling.get("rope_theta") or 10_000.0
    return Rope(theta * alpha ** (head_dim / (head_dim - 2)))
