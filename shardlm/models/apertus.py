"""Apertus (https://arxiv.org/abs/2509.14233): Llama's decoder with norms on the queries and keys of each head, and
xIELU without a gate."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` apertus."""
    options.only("hidden_act", "xielu")
    options.only("qk_norm", True)
    options.only("post_norm", False)
    options.only("mlp_bias", False)
    norm = hf_decoder.rms(options)
    attention = hf_decoder.attention(options, length, qk_norm="head", norm=norm)
    block = BlockConfig(attention, MlpConfig(options("intermediate_size"), "xielu", gated=False))
    return hf_decoder.decoder(options, lambda layer: block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
    theirs = {"rise": "alpha_p", "bend": "alpha_n", "slope": "beta", "top": "eps"}
    return found | {f"mlp.{ours}": Tensor(f"{LAYER}mlp.act_fn.{name}") for ours, name in theirs.items()}
