"""OLMo 2 (https://arxiv.org/abs/2501.00656): norms after each layer, and on all queries and all keys together."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` olmo2."""
    options.only("clip_qkv", None)
    norm = hf_decoder.rms(options)
    attention = hf_decoder.attention(options, length, qk_norm="all", norm=norm)
    block = BlockConfig(attention, hf_decoder.mlp(options), norms="post")
    return hf_decoder.decoder(options, lambda layer: block, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard(attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")
