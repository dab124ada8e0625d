"""DeepSeek V3.2 (https://arxiv.org/abs/2512.02556): V3's decoder, whose queries attend to the tokens that an indexer
chooses."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.indexer import IndexerConfig
from shardlm.layers.mla import MlaConfig
from shardlm.models import deepseek
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig

ASIDE = ("qk_head_dim", "head_dim", "num_key_value_heads", "mlp_bias")  # told by other options, or of no layer


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` deepseek_v32 and glm_moe_dsa."""
    options.only("moe_layer_freq", 1)
    options.only("attention_bias", False)
    options.only("rope_interleave", True)
    latent = deepseek.latent(options, length)
    options.aside(*ASIDE)
    heads = options("index_n_heads", 64 if options("model_type") == "deepseek_v32" else 32)
    rope = dataclasses.replace(latent.rope, dim=latent.rope.dim or latent.rope_dim)
    own = IndexerConfig(heads, options("index_head_dim", 128), options("index_topk", 2048), rope)
    shared = shared_layers(options)

    def attention(layer: int) -> MlaConfig:
        indexer = dataclasses.replace(own, shared=layer < len(shared) and shared[layer])
        return dataclasses.replace(latent, indexer=indexer)

    return deepseek.decoder(options, attention, deepseek.experts_of(options, True, normalize=True), first=3)


def shared_layers(options: Options) -> list[bool]:
    """Which layers attend to what the indexer of one before them chose: by `indexer_types`, by a pattern of F and S, or
    all but every `index_topk_freq`-th from some layer on (GLM-5)."""
    layers, kinds = options("num_hidden_layers"), options("layer_types", None)
    if kinds is not None and set(kinds) != {"indexed_attention"}:
        raise ShardlmError(f"config.json has layer_types={kinds!r}; supported: 'indexed_attention' for each layer")
    told, pattern = options("indexer_types", None), options("index_topk_pattern", None)
    every, first = max(options("index_topk_freq", 1), 1), options("index_skip_topk_offset", 2)
    if told is None and pattern is not None:
        told = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if told is None:
        return [max(layer - first + 1, 0) % every > 0 for layer in range(layers)]
    if len(told) != layers or not {"full", "shared"}.issuperset(told) or told[0] != "full":
        raise ShardlmError(
            f"config.json has indexer_types={told!r}; it needs num_hidden_layers={layers} of full and shared, the "
            "first of them full"
        )
    return [kind == "shared" for kind in told]


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return deepseek.names(config, block) | indexer_names(block.attention.indexer, interleaved=False)


def indexer_names(indexer: IndexerConfig, interleaved: bool) -> Names:
    """`interleaved`: rotated dimensions are in adjacent pairs."""
    if indexer.shared:
        return {}
    theirs = f"{LAYER}self_attn.indexer."
    pairs = ("H", 0, indexer.rope.dim) if interleaved else None
    return {
        "attention.indexer.wq": Tensor(f"{theirs}wq_b.weight", "(N H) Q -> Q N H", pairs=pairs),
        "attention.indexer.wk": Tensor(f"{theirs}wk.weight", "H D -> D H", pairs=pairs),
        "attention.indexer.heads": Tensor(f"{theirs}weights_proj.weight", "N D -> D N"),
        "attention.indexer.k_norm.scale": Tensor(f"{theirs}k_norm.weight", "H -> H", pairs=pairs),
        "attention.indexer.k_norm.bias": Tensor(f"{theirs}k_norm.bias", "H -> H", pairs=pairs),
    }
