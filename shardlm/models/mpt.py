"""MPT (https://www.databricks.com/blog/mpt-7b): linear biases in place of positions, layer norms without biases, a
plain GELU."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, fused
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.alibi import slopes_above

LAYER = "transformer.blocks.{layer}."
# Of training, and of code that ran it. Positions are never learned with linear biases, whatever is said.
HOW = ("init_config", "init_device", "tokenizer_name", "verbose", "embedding_fraction", "emb_pdrop", "learned_pos_emb")
HOW += ("max_seq_len",)  # registry.longest


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mpt, whose attention has options of its own."""
    for name in HOW:
        options(name, None)
    options.only("no_bias", True)
    options.only("logit_scale", None)
    options.only("expansion_ratio", 4)
    options.only("norm_type", "low_precision_layernorm", "layernorm")
    D, N = options("d_model"), options("n_heads")
    attention = _attention(options.inside("attn_config"), D, N)
    block = BlockConfig(attention, MlpConfig(4 * D, "gelu", gated=False))
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=D,
        segments=segments_of([block] * options("n_layers")),
        norm=NormConfig("layer", options("layer_norm_epsilon", 1e-5), bias=False),
        tie_embeddings=bool(options("tie_word_embeddings", True)),
    )


def _attention(options: Options, D: int, N: int) -> AttentionConfig:
    options("attn_impl", None)  # of training
    options.only("attn_type", "multihead_attention")
    options.only("alibi", True)
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        options.only(name, False)
    of_heads = slopes_above(N, float(options("alibi_bias_max", 8)))
    own = {"clip": float(options("clip_qkv", 0.0)), "scale": float(options("softmax_scale", (D / N) ** -0.5))}
    options.finish()
    return AttentionConfig.with_slopes(N, N, D // N, of_heads, **own)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = {
        "embedding": Tensor("transformer.wte.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
        "final_norm.scale": Tensor("transformer.norm_f.weight"),
        "attention_norm.scale": Tensor(f"{LAYER}norm_1.weight"),
        "mlp_norm.scale": Tensor(f"{LAYER}norm_2.weight"),
        "attention.wo": Tensor(f"{LAYER}attn.out_proj.weight", "D (N H) -> N H D"),
        "mlp.up": Tensor(f"{LAYER}ffn.up_proj.weight", "F D -> D F"),
        "mlp.down": Tensor(f"{LAYER}ffn.down_proj.weight", "D F -> F D"),
    }
    each = {f"attention.w{letter}": config.embed_dim for letter in "qkv"}
    return found | fused(dict.fromkeys(each, Tensor("", "(N H) D -> D N H")), f"{LAYER}attn.Wqkv.weight", each)
