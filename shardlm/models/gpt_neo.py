"""GPT-Neo (https://github.com/EleutherAI/gpt-neo): GPT-2 with sliding windows in every other layer, and scores as they
are."""

import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import segments_of
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, Tensor, layer_norms, linear
from shardlm.models.transformer_config import TransformerConfig

LAYER = "transformer.h.{layer}."
KINDS = ("global", "local")
LONGEST = 2048  # positions, where config.json does not say it


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gpt_neo."""
    for name in ("resid_dropout", "embed_dropout", "classifier_dropout"):  # of training
        options(name, None)
    options.where_absent(activation_function="gelu_new")
    D, N = options("hidden_size"), options("num_heads")
    width = options("intermediate_size", 4 * D)
    hidden = MlpConfig(width, options.activation("activation_function"), gated=False, bias=True)

    def block(window: int) -> BlockConfig:
        return BlockConfig(AttentionConfig(N, N, D // N, None, window, out_bias=True, scale=1.0), hidden)

    return TransformerConfig(
        vocab_size=options("vocab_size"),
        embed_dim=D,
        segments=segments_of([block(window) for window in _windows(options)]),
        norm=NormConfig("layer", options("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(options("tie_word_embeddings", True)),
        max_positions=options("max_position_embeddings", LONGEST),
    )


def _windows(options: Options) -> list[int]:
    """Of each layer, 0 for those that see everything. `attention_layers` says the same once more."""
    layers, window = options("num_layers"), options("window_size", 256)
    options("attention_layers", None)
    types = options("attention_types", [[KINDS, 12]])
    kinds = [kind for some, times in types for kind in list(some) * times]
    if len(kinds) != layers or not set(KINDS).issuperset(kinds):
        raise ShardlmError(
            f"config.json has attention_types={types!r}; it needs num_layers={layers} of {', '.join(KINDS)} together"
        )
    return [window if kind == "local" else 0 for kind in kinds]


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    inside = f"{LAYER}attn.attention."
    found = {
        "embedding": Tensor("transformer.wte.weight"),
        "positions": Tensor("transformer.wpe.weight"),
        "head": Tensor("lm_head.weight", "V D -> D V"),
    }
    for letter in "qkv":
        found |= linear(f"attention.w{letter}", f"{inside}{letter}_proj", "q")
    found |= linear("attention.wo", f"{inside}out_proj", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.c_fc", "into") | linear("mlp.down", f"{LAYER}mlp.c_proj", "out")
    return found | layer_norms(attention_norm=f"{LAYER}ln_1", mlp_norm=f"{LAYER}ln_2", final_norm="transformer.ln_f")


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """Buffers of masks."""
    del text
    return re.compile(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)$")
