"""GPT-2 (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf): layer
norms, learned positions, biases, a plain GELU."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, fused
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gpt2."""
    return decoder(options, kv_heads=options("n_head"))


def decoder(options: Options, kv_heads: int) -> TransformerConfig:
    """By GPT-2's option names."""
    options.only("scale_attn_weights", True)
    options.only("scale_attn_by_inverse_layer_idx", False)
    options.only("add_cross_attention", False)
    options("reorder_and_upcast_attn", False)  # the order of the same products
    D, N = options("n_embd"), options("n_head")
    norm = NormConfig("layer", options("layer_norm_epsilon", 1e-5))
    hidden = MlpConfig(options("n_inner", 0) or 4 * D, options.activation("activation_function"), False, True)
    block = BlockConfig(AttentionConfig(N, kv_heads, D // N, rope=None, bias=True, out_bias=True), hidden)
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=D,
        segments=segments_of([block] * options("n_layer")),
        norm=norm,
        tie_embeddings=bool(options("tie_word_embeddings", True)),
        max_positions=options("n_positions"),
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    layer, D = "transformer.h.{layer}.", config.embed_dim
    found = {
        "embedding": Tensor("transformer.wte.weight"),
        "positions": Tensor("transformer.wpe.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
        "attention.wo": Tensor(f"{layer}attn.c_proj.weight", "(N H) D -> N H D"),
        "attention.bo": Tensor(f"{layer}attn.c_proj.bias"),
        "mlp.up": Tensor(f"{layer}mlp.c_fc.weight"),
        "mlp.up_bias": Tensor(f"{layer}mlp.c_fc.bias"),
        "mlp.down": Tensor(f"{layer}mlp.c_proj.weight"),
        "mlp.down_bias": Tensor(f"{layer}mlp.c_proj.bias"),
    }
    for ours, theirs in (("attention_norm", "h.{layer}.ln_1"), ("mlp_norm", "h.{layer}.ln_2"), ("final_norm", "ln_f")):
        found[f"{ours}.scale"] = Tensor(f"transformer.{theirs}.weight")
        found[f"{ours}.bias"] = Tensor(f"transformer.{theirs}.bias")
    for kind, layout, dim in (("w", "D (N H) -> D N H", 1), ("b", "(N H) -> N H", 0)):
        parts = {f"attention.{kind}{letter}": D for letter in "qkv"}
        theirs = f"{layer}attn.c_attn.{'weight' if kind == 'w' else 'bias'}"
        found |= fused(dict.fromkeys(parts, Tensor("", layout)), theirs, parts, dim)
    return found
