"""Nemotron (https://arxiv.org/abs/2402.16819): layer norms whose checkpoints have the distance of scales from 1,
squared ReLU without a gate, a rotation of half of each head."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` nemotron."""
    attention = hf_decoder.attention(options, length, partial=0.5)
    block = BlockConfig(attention, hf_decoder.mlp(options, gated=False))
    return hf_decoder.decoder(options, lambda layer: block, NormConfig("layer", options("norm_eps"), offset=1.0))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    biases = {f"{ours}.bias": Tensor(f"{LAYER}{theirs}.bias") for ours, theirs in norms.items()}
    return standard() | biases | {"final_norm.bias": Tensor("model.norm.bias")}
