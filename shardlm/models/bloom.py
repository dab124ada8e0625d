"""BLOOM (https://arxiv.org/abs/2211.05100): linear biases in place of positions, layer norms, of the embedding too,
biases, a plain GELU."""

import re

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, fused_by_head, layer_norms, linear
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.alibi import slopes

LAYER = "transformer.h.{layer}."
LONGEST = 2048  # positions, where config.json does not say it
OLDER = (("n_embed", "hidden_size"), ("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer"))
# How it was trained, and how the first code ran: not what is computed.
HOW = ("hidden_dropout", "masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi", "attention_softmax_in_fp32")
HOW += ("seq_length", "unk_token_id", "slow_but_exact", "n_inner", "skip_bias_add", "skip_bias_add_qkv")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` bloom. Published options have older names."""
    for name in HOW:
        options(name, None)
    options.only("apply_residual_connection_post_layernorm", False)
    D, N = (options(older, 0) or options(name) for older, name in OLDER[:2])
    own = {"bias": True, "out_bias": True, "scale": (D // N) ** -0.5}
    attention = AttentionConfig.with_slopes(N, N, D // N, slopes(N), **own)
    block = BlockConfig(attention, MlpConfig(4 * D, "gelu_tanh", gated=False, bias=True))
    norm = NormConfig("layer", options("layer_norm_epsilon", 1e-5))
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=D,
        segments=segments_of([block] * (options(OLDER[2][0], 0) or options(OLDER[2][1]))),
        norm=norm,
        tie_embeddings=bool(options("tie_word_embeddings", True)),
        embed_norm=norm,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = {
        "embedding": Tensor("transformer.word_embeddings.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
    }
    found |= fused_by_head(f"{LAYER}self_attention.query_key_value", block.attention.projected_dim, 1)
    found |= linear("attention.wo", f"{LAYER}self_attention.dense", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.dense_h_to_4h", "into")
    found |= linear("mlp.down", f"{LAYER}mlp.dense_4h_to_h", "out")
    return found | layer_norms(
        embed_norm="transformer.word_embeddings_layernorm",
        attention_norm=f"{LAYER}input_layernorm",
        mlp_norm=f"{LAYER}post_attention_layernorm",
        final_norm="transformer.ln_f",
    )


def published_name(name: str) -> str:
    """Of the decoder alone too, as it is published."""
    return re.sub(r"^(?=h\.|word_embeddings|ln_f\.)", "transformer.", name)
