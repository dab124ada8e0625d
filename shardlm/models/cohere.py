"""Command R, R+ and Aya (https://arxiv.org/abs/2405.15032): attention and feed-forward side by side after one layer
norm without a bias, a rotation in adjacent pairs, a factor on the logits; R+ has norms of each head of queries and
keys. Command R7B and A (https://arxiv.org/abs/2504.00698): sliding windows between layers that see everything and are
not rotated. Its mixture: a few dense layers, then experts and shared ones, of which the mean is taken."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, in_pairs
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig
from shardlm.ops.routing import Router

# As all published ones have them; the first is what transformers computes.
FIXED = {
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "use_qk_norm": (False,),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "order_of_interleaved_layers": ("local_attn_first",),
}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` cohere, cohere2 and cohere2_moe."""
    if options("model_type") == "cohere":
        return _first(options, length)
    for name, known in FIXED.items():
        options.only(name, *known)
    options("use_embedding_sharing", None), options("use_parallel_embedding", None)  # of their own code
    period = options("sliding_window_pattern", 0) or options("layer_switch", 4)
    options("layer_switch", None)
    mixed = options("model_type") == "cohere2_moe"
    first = _dense_layers(options) if mixed else 0
    dense_period = options("prefix_dense_sliding_window_pattern", 1) if mixed else period

    def usual(layer: int) -> bool:
        return (layer + 1) % dense_period != 0 if layer < first else (layer - first + 1) % period != 0

    windows, usual_attention = hf_decoder.sliding(options, usual), hf_decoder.attention(options, length)
    dense, sparse = (_dense(options), _experts(options)) if mixed else (hf_decoder.mlp(options), None)

    def block(layer: int) -> BlockConfig:
        rotated = windows[layer] or (layer < first and dense_period == 1)
        own = {"window": windows[layer], "rope": usual_attention.rope if rotated else None}
        feed_forward = sparse if sparse and layer >= first else dense
        return BlockConfig(dataclasses.replace(usual_attention, **own), feed_forward, parallel=True)

    norm = NormConfig("layer", options("layer_norm_eps", 1e-5), bias=False)
    if mixed and options("rms_norm_eps", None):
        norm = hf_decoder.rms(options)
    return hf_decoder.decoder(options, block, norm, True, logits=LogitsConfig(scale=options("logit_scale", 0.0625)))


def _first(options: Options, length: int) -> TransformerConfig:
    options.where_absent(rope_theta=500_000.0)
    options("model_max_length", None)  # registry.longest
    norm = NormConfig("layer", options("layer_norm_eps", 1e-5), bias=False)
    qk_norm = "each" if options("use_qk_norm", False) else "none"
    attention = hf_decoder.attention(options, length, qk_norm=qk_norm, norm=norm)
    block = BlockConfig(attention, hf_decoder.mlp(options), parallel=True)
    logits = LogitsConfig(scale=options("logit_scale", 0.0625))
    return hf_decoder.decoder(options, lambda layer: block, norm, True, logits=logits)


def _dense_layers(options: Options) -> int:
    """How many come before those with experts."""
    kinds, first = options("mlp_layer_types", None), options("first_k_dense_replace", 0)
    if kinds is None:
        return first
    first, layers = kinds.index("sparse") if "sparse" in kinds else len(kinds), options("num_hidden_layers")
    options.only("mlp_layer_types", ["dense"] * first + ["sparse"] * (layers - first))
    return first


def _dense(options: Options) -> MlpConfig | None:
    width = options("prefix_dense_intermediate_size", 0) or options("intermediate_size")
    return MlpConfig(width, options.activation())


def _experts(options: Options) -> MoeConfig:
    """Softmax over the chosen is, to the letter, weights that sum to 1."""
    options.only("expert_selection_fn", "softmax", "sigmoid")
    options.only("shared_expert_combination_strategy", "average", "sum")
    scoring, shared = options("expert_selection_fn", "softmax"), options("num_shared_experts", 0)
    scale = 0.5 if shared and options("shared_expert_combination_strategy", "average") == "average" else 1.0
    normalize = bool(options("norm_topk_prob", True)) or scoring == "softmax"
    width = options("intermediate_size")
    return MoeConfig(
        num_experts=options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width * shared,
        shared_scale=scale,
        router=Router(scoring, normalize, scale=scale),
        activation=options.activation(),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block)
    H = block.attention.head_dim
    for letter in "qk":  # of heads that are in pairs as well
        name = f"{LAYER}self_attn.{letter}_norm.weight"
        found[f"attention.{letter}_norm.scale"] = Tensor(name, "N H -> N H", pairs=("H", 0, H))
    return found | (in_pairs(found, H) if block.attention.rope else {})
