"""StarCoder 2 (https://arxiv.org/abs/2402.19173): layer norms, biases, a plain GELU, a sliding window."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, linear, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` starcoder2."""
    options.only("norm_type", "layer_norm")
    options.only("mlp_type", "default")
    options("residual_dropout", 0.0), options("embedding_dropout", 0.0)  # of training
    bias = bool(options("use_bias", True))
    windows = hf_decoder.sliding(options, lambda layer: True)
    feed_forward = hf_decoder.mlp(options, gated=False, bias=bias)

    def block(layer: int) -> BlockConfig:
        attention = hf_decoder.attention(options, length, window=windows[layer], bias=bias, out_bias=bias)
        return BlockConfig(attention, feed_forward)

    return hf_decoder.decoder(options, block, NormConfig("layer", options("norm_epsilon")), True)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard() | linear("mlp.up", f"{LAYER}mlp.c_fc", "into") | linear("mlp.down", f"{LAYER}mlp.c_proj", "out")
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    found |= {f"{ours}.bias": Tensor(f"{LAYER}{theirs}.bias") for ours, theirs in norms.items()}
    return found | {"final_norm.bias": Tensor("model.norm.bias")}
