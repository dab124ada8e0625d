"""OPT (https://arxiv.org/abs/2205.01068): layer norms, learned positions, biases, ReLU without a gate. Galactica
(https://arxiv.org/abs/2211.09085) is one without biases."""

import re

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, layer_norms, linear
from shardlm.models.transformer_config import TransformerConfig

LAYER = "model.decoder.layers.{layer}."
LONGEST = 2048  # positions, where config.json does not say it
FIRST = 2  # row of the positions' table that a text begins with, in all of them


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` opt."""
    for name in ("activation_dropout", "init_std", "layerdrop", "prefix"):  # of training, and of tokenizers
        options(name, None)
    options.where_absent(activation_function="relu")
    D, N, bias = options("hidden_size"), options("num_attention_heads"), bool(options("enable_bias", True))
    width, before = options("word_embed_proj_dim", D), options("do_layer_norm_before", True)
    if width != D or not before:
        raise ShardlmError(
            f"config.json has word_embed_proj_dim={width} of hidden_size={D}, do_layer_norm_before={before}, as OPT "
            "350M alone: supported is an embedding as wide as the layers, and norms before them; choose another size "
            "of OPT (125m, 1.3b, 2.7b, 6.7b, 13b, 30b, 66b)"
        )
    options.only("_remove_final_layer_norm", False)
    options.only("learned_embeddings", True)  # Galactica says so; of scaled ones it says that they are not
    scaled = bool(options("layer_norm_elementwise_affine", True))
    attention = AttentionConfig(N, N, D // N, rope=None, bias=bias, out_bias=bias)
    network = MlpConfig(options("ffn_dim"), options.activation("activation_function"), gated=False, bias=bias)
    block, norm = BlockConfig(attention, network), NormConfig("layer", bias=scaled, scaled=scaled)
    positions = options("max_position_embeddings", LONGEST)
    return hf_decoder.decoder(options, lambda layer: block, norm, True, max_positions=positions, first_position=FIRST)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = {
        "embedding": Tensor("model.decoder.embed_tokens.weight"),
        "positions": Tensor("model.decoder.embed_positions.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
    }
    for letter in "qkv":
        found |= linear(f"attention.w{letter}", f"{LAYER}self_attn.{letter}_proj", "q")
    found |= linear("attention.wo", f"{LAYER}self_attn.out_proj", "o")
    found |= linear("mlp.up", f"{LAYER}fc1", "into") | linear("mlp.down", f"{LAYER}fc2", "out")
    return found | layer_norms(
        attention_norm=f"{LAYER}self_attn_layer_norm",
        mlp_norm=f"{LAYER}final_layer_norm",
        final_norm="model.decoder.final_layer_norm",
    )


def published_name(name: str) -> str:
    """Of the decoder alone too, as some are published."""
    return re.sub(r"^decoder\.", "model.decoder.", name)
