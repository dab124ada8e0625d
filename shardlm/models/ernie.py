"""ERNIE 4.5 (https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf): Llama's decoder, rotated in adjacent
pairs; dense, or experts chosen by a softmax and a bias, with shared ones beside them."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, in_pairs
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` ernie4_5 and ernie4_5_moe."""
    options.only("use_bias", False)
    attention, dense = hf_decoder.attention(options, length), hf_decoder.mlp(options)
    sparse, routed = None, range(0)
    if options("model_type") == "ernie4_5_moe":
        sparse, routed = _experts(options), _routed(options)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(attention, sparse if layer in routed else dense)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options), True)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block)
    bias = Tensor(f"{LAYER}mlp.moe_statics.e_score_correction_bias", "1 E -> E")
    return found | in_pairs(found, block.attention.head_dim) | {"mlp.router_bias": bias}


def _routed(options: Options) -> range:
    """The layers that have experts."""
    layers, last = options("num_hidden_layers"), options("moe_layer_end_index", -1)
    period, first = options("moe_layer_interval", 1), options("moe_layer_start_index", 1)
    after = layers if last == -1 else min(last + 1, layers)
    return range(-(-(first + 1) // period) * period - 1, after, period)


def _experts(options: Options) -> MoeConfig:
    options.only("moe_gate", "topk")
    options.only("moe_use_aux_free", True)
    options("moe_capacity", None), options("moe_norm_min", 0.0)  # of training; what keeps a sum from being 0
    options("num_nextn_predict_layers", 0)  # are left aside
    width = options("moe_intermediate_size")
    return MoeConfig(
        num_experts=options("moe_num_experts", 0) or options("num_experts"),
        top_k=options("moe_k", 0) or options("num_experts_per_tok"),
        expert_dim=width,
        shared_dim=width * options("moe_num_shared_experts", 0),
        activation=options.activation(),
        load_bias=True,
    )
