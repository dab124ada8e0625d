"""Falcon (https://arxiv.org/abs/2311.16867): attention and a plain GELU side by side after layer norms, one head of
keys and values (7B) or a few (40B, 180B, 11B); RefinedWeb's (1B, 7B) have linear biases, and both layers in turn."""

import re
from collections.abc import Mapping
from typing import Any

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import Names, Tensor, fused_by_head, layer_norms, linear
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.alibi import slopes

LAYER = "transformer.h.{layer}."
LONGEST = 2048  # positions, where config.json does not say it, as in the first


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` falcon."""
    for name in ("hidden_dropout", "ff_factor"):  # of training; said as ffn_hidden_size
        options(name, None)
    options.only("apply_residual_connection_post_layernorm", False)
    options.where_absent(activation="gelu")
    D, N, bias = options("hidden_size"), options("num_attention_heads"), bool(options("bias", False))
    newer, side_by_side = bool(options("new_decoder_architecture", False)), bool(options("parallel_attn", True))
    kv_heads, known = options("num_kv_heads", N), (2, 1) if newer else (1,)
    one = options("multi_query", True) and not newer
    if newer:
        options.only("parallel_attn", True)
    options.only("num_ln_in_parallel_attn", *known)
    apart = side_by_side and options("num_ln_in_parallel_attn", known[0]) == 2
    rope, own = rope_of(options, D // N, length=length), {"bias": bias, "out_bias": bias}
    attention = AttentionConfig(N, 1 if one else kv_heads, D // N, rope, **own)
    # Which the factor on scores multiplies too. (transformers rounds these biases to bfloat16.)
    if options("alibi", False):
        scale = (D // N) ** -0.5
        of_heads = tuple(scale * slope for slope in slopes(N))
        attention = AttentionConfig.with_slopes(N, attention.num_kv_heads, D // N, of_heads, scale=scale, **own)
    network = MlpConfig(options("ffn_hidden_size", 4 * D), options.activation("activation"), gated=False, bias=bias)
    block = BlockConfig(attention, network, parallel=side_by_side, norms_apart=apart)
    norm = NormConfig("layer", options("layer_norm_epsilon", 1e-5))
    return hf_decoder.decoder(options, lambda layer: block, norm, True)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    heads, group = block.attention, block.attention.num_heads // block.attention.num_kv_heads
    before = ("ln_attn", "ln_mlp") if block.norms_apart else ("input_layernorm", "post_attention_layernorm")
    found = {
        "embedding": Tensor("transformer.word_embeddings.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
    }
    found |= fused_by_head(f"{LAYER}self_attention.query_key_value", heads.projected_dim, group)
    found |= linear("attention.wo", f"{LAYER}self_attention.dense", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.dense_h_to_4h", "into")
    found |= linear("mlp.down", f"{LAYER}mlp.dense_4h_to_h", "out")
    return found | layer_norms(
        attention_norm=f"{LAYER}{before[0]}", mlp_norm=f"{LAYER}{before[1]}", final_norm="transformer.ln_f"
    )


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """Buffers of rotations."""
    del text
    return re.compile(r"transformer\.h\.\d+\.self_attention\.(maybe_)?rotary(_emb)?\.inv_freq$")
