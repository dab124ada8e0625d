"""LFM2 (https://arxiv.org/abs/2511.23404), dense and with experts: gated short convolutions, and a few layers that
attend, with norms of queries and keys. Experts are chosen as DeepSeek V3's, behind a few dense layers."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.short_conv import ShortConvConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, NUMBERED, Names, Tensor, experts, gated, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.routing import Router

CONV, FULL = "conv", "full_attention"
# How weights begin, and sizes that transformers takes from other options.
ASIDE = ("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init")
ASIDE += ("conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads")
EPS = 1e-6  # beside the sum of the chosen experts' scores, as transformers has it


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` lfm2 and lfm2_moe."""
    options.aside(*ASIDE)
    options.only_all({"conv_bias": False, "block_use_swiglu": True, "use_pos_enc": True})
    if not options("rope_parameters", None):
        options("rope_theta")
    norm, conv = NormConfig("rms", options("norm_eps", 1e-5)), convolution(options)
    attention = hf_decoder.attention(options, length, qk_norm="head", norm=norm)
    kinds, sparse = _kinds(options), options("model_type") == "lfm2_moe"
    dense = MlpConfig(options("intermediate_size") if sparse else _width(options))
    first = options("num_dense_layers", 2) if sparse else len(kinds)
    mixture = _experts(options) if sparse else dense

    def block(layer: int) -> BlockConfig:
        return BlockConfig(conv if kinds[layer] == CONV else attention, dense if layer < first else mixture)

    older = options("tie_embedding", None)
    found = hf_decoder.decoder(options, block, norm, tied=True)
    return found if older is None else dataclasses.replace(found, tie_embeddings=bool(older))


def _kinds(options: Options) -> list[str]:
    """Of each layer."""
    layers, attends = options("num_hidden_layers"), options("full_attn_idxs", None)
    kinds = options("layer_types", None)
    if kinds is None:
        attends = range(layers) if attends is None else attends
        kinds = [FULL if layer in attends else CONV for layer in range(layers)]
    if len(kinds) != layers or not {CONV, FULL}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of {CONV}, {FULL}"
        )
    return kinds


def convolution(options: Options, usual: int = 3) -> ShortConvConfig:
    """As many parts as there are heads, so that devices split both alike."""
    heads, width = options("num_attention_heads"), options("conv_L_cache", usual)
    return ShortConvConfig.of(heads, options("hidden_size") // heads, width)


def _width(options: Options) -> int:
    """Of dense models' feed-forward layers, of which options say half as much again, unless they are not to be
    adjusted."""
    width = options("block_ff_dim", 0) or options("intermediate_size")
    factor, multiple = options("block_ffn_dim_multiplier", 1.0), options("block_multiple_of", 256)
    options.asked.add("intermediate_size")
    if not options("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _experts(options: Options) -> MoeConfig:
    normalize, scale = bool(options("norm_topk_prob", True)), float(options("routed_scaling_factor", 1.0))
    return MoeConfig(
        num_experts=options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("moe_intermediate_size"),
        router=Router("sigmoid", normalize, scale=scale, eps=EPS),
        load_bias=bool(options("use_expert_bias", True)),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    norms = {"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"}
    norms |= {f"attention.{letter}_norm": f"self_attn.{letter}_layernorm" for letter in "qk"}
    found = standard(**norms) | {"final_norm.scale": Tensor("model.embedding_norm.weight")}
    found["attention.wo"] = Tensor(f"{LAYER}self_attn.out_proj.weight", "D (N H) -> N H D")
    if isinstance(block.attention, ShortConvConfig):
        found |= conv_names(block.attention)
    if isinstance(block.mlp, MoeConfig):
        routed = experts("feed_forward", **NUMBERED)
        return found | routed | {"mlp.router_bias": Tensor(f"{LAYER}feed_forward.expert_bias")}
    return found | dense_names()


def dense_names() -> Names:
    return gated("mlp.", f"{LAYER}feed_forward.", **NUMBERED)


def conv_names(conv: ShortConvConfig) -> Names:
    """One projection makes what gates the convolution's input, what gates its output, and the input."""
    inside, size = f"{LAYER}conv.", conv.num_heads * conv.value_dim
    found = {
        "attention.taps_v": Tensor(f"{inside}conv.weight", "(N H) 1 W -> N H W"),
        "attention.wo": Tensor(f"{inside}out_proj.weight", "D (N H) -> N H D"),
    }
    for place, letter in enumerate("kgv"):
        part = (0, place * size, (place + 1) * size, 1)
        found[f"attention.w{letter}"] = Tensor(f"{inside}in_proj.weight", "(N H) D -> D N H", part=part)
    return found
