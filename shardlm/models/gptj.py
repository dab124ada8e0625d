"""GPT-J (https://github.com/kingoflolz/mesh-transformer-jax): attention and a plain GELU side by side after one layer
norm, a rotation in adjacent pairs of a part of each head, an output head with a bias."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, in_pairs, layer_norms, linear
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope

LAYER = "transformer.h.{layer}."


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gptj."""
    for name in ("rotary", "scale_attn_weights"):
        options.only(name, True)
    options("n_positions", None)
    options.where_absent(rotary_dim=64, activation_function="gelu_new")
    D, N = options("n_embd"), options("n_head")
    attention = AttentionConfig(N, N, D // N, Rope(dim=options("rotary_dim")))
    hidden = MlpConfig(options("n_inner", 4 * D), options.activation("activation_function"), gated=False, bias=True)
    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=D,
        segments=segments_of([BlockConfig(attention, hidden, parallel=True)] * options("n_layer")),
        norm=NormConfig("layer", options("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(options("tie_word_embeddings", False)),
        head_bias=True,
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = {
        "embedding": Tensor("transformer.wte.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
        "head_bias": Tensor("lm_head.bias"),
    }
    for letter in "qkv":
        found |= linear(f"attention.w{letter}", f"{LAYER}attn.{letter}_proj", "q")
    found |= in_pairs(found, block.attention.rope.dim) | linear("attention.wo", f"{LAYER}attn.out_proj", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.fc_in", "into") | linear("mlp.down", f"{LAYER}mlp.fc_out", "out")
    return found | layer_norms(attention_norm=f"{LAYER}ln_1", final_norm="transformer.ln_f")
