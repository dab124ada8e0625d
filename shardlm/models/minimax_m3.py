"""MiniMax M3 (transformers' modeling_minimax_m3_vl.py is the definition), the part that reads text: grouped-query
attention whose kv heads attend to blocks of tokens that an indexer chooses for each, after a few layers that attend to
all; dense layers, then experts chosen by sigmoids and a bias, with GPT-OSS's clamped gates, and a shared one."""

import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.head_indexer import HeadIndexerConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, experts, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope
from shardlm.ops.routing import Router
from shardlm.ops.swiglu import ALPHA, LIMIT

SPARSE, FULL = "minimax_m3_sparse", "full_attention"
# Of an indexer: as transformers has them, as published, and where neither is said.
INDEXER = {
    "index_n_heads": ("sparse_num_index_heads", 4),
    "index_head_dim": ("sparse_index_dim", 128),
    "index_block_size": ("sparse_block_size", 128),
    "index_topk_blocks": ("sparse_topk_blocks", 16),
    "index_local_blocks": ("sparse_local_block", 1),
}
KNOWN = {  # of its first code; what transformers computes
    "swiglu_limit": LIMIT,
    "swiglu_alpha": ALPHA,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` minimax_m3_vl_text. Modules that predict further tokens are left aside."""
    options.where_absent(head_dim=128, rotary_dim=64, rope_theta=5_000_000.0, routed_scaling_factor=2.0)
    options.only("hidden_act", "swigluoai", "silu")
    for name, known in KNOWN.items():
        options.only(name, known)
    for name in ("num_mtp_modules", "use_mtp", "num_nextn_predict_layers", "mtp_transformer_layers"):
        options(name, None)
    norm, sparse, mixed = hf_decoder.rms(options, offset=1.0), _sparse(options), _mixed(options)
    own = {"bias": False, "out_bias": False, "qk_norm": "head", "norm": norm}
    partial = options("rotary_dim") / options("head_dim")
    full = hf_decoder.attention(options, length, partial, **own)
    indexer = _indexer(options, full.rope, norm, full.num_kv_heads) if any(sparse) else None
    chosen = hf_decoder.attention(options, length, partial, **own, indexer=indexer)
    dense, mixture = MlpConfig(options("dense_intermediate_size", 12288), "clamped"), _experts(options)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(chosen if sparse[layer] else full, mixture if mixed[layer] else dense)

    return hf_decoder.decoder(options, block, norm)


def _experts(options: Options) -> MoeConfig:
    return MoeConfig(
        num_experts=options("num_local_experts", 0) or options("num_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        shared_dim=options("shared_intermediate_size", 3072) * options("n_shared_experts", 1),
        router=Router("sigmoid", scale=float(options("routed_scaling_factor"))),
        activation="clamped",
        load_bias=True,
    )


def _of_layers(options: Options, name: str, found: list[str], known: tuple[str, str]) -> list[bool]:
    """Which layers are of the first kind."""
    layers = options("num_hidden_layers")
    if len(found) != layers or not set(known).issuperset(found):
        raise ShardlmError(
            f"config.json has {name}={found!r}; it needs num_hidden_layers={layers} of {', '.join(known)}"
        )
    return [kind == known[0] for kind in found]


def _sparse(options: Options) -> list[bool]:
    """Which layers attend to chosen blocks: by `layer_types`, or as published by numbers."""
    kinds, told = options("layer_types", None), options("sparse_attention_config", None) or {}
    if kinds is None and "sparse_attention_freq" in told:
        kinds = [SPARSE if one else FULL for one in told["sparse_attention_freq"]]
    return _of_layers(options, "layer_types", kinds or [FULL] * options("num_hidden_layers"), (SPARSE, FULL))


def _mixed(options: Options) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`, or as published by numbers."""
    kinds, told = options("mlp_layer_types", None), options("moe_layer_freq", None)
    if kinds is None and told is not None:
        kinds = ["sparse" if one else "dense" for one in told]
    kinds = kinds or ["sparse"] * options("num_hidden_layers")
    return _of_layers(options, "mlp_layer_types", kinds, ("sparse", "dense"))


def _indexer(options: Options, rope: Rope, norm: NormConfig, kv_heads: int) -> HeadIndexerConfig:
    told = options("sparse_attention_config", None) or {}
    heads, dim, block, count, last = (told.get(own, options(name, usual)) for name, (own, usual) in INDEXER.items())
    if heads != kv_heads:
        raise ShardlmError(f"config.json has index_n_heads={heads}; supported: num_key_value_heads={kv_heads}")
    return HeadIndexerConfig(heads, dim, count, block, last, rope, norm)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    """As published."""
    inside, theirs = f"{LAYER}block_sparse_moe.", f"{LAYER}self_attn.index_"
    found = standard() | {
        "attention.indexer.wq": Tensor(f"{theirs}q_proj.weight", "(N H) D -> D N H"),
        "attention.indexer.wk": Tensor(f"{theirs}k_proj.weight", "H D -> D H"),
        "attention.indexer.q_norm.scale": Tensor(f"{theirs}q_norm.weight"),
        "attention.indexer.k_norm.scale": Tensor(f"{theirs}k_norm.weight"),
    }
    if not isinstance(block.mlp, MoeConfig):
        return found
    found |= experts("block_sparse_moe", gate="w1", up="w3", down="w2")
    for part, layout in (("gate", "F D -> D F"), ("up", "F D -> D F"), ("down", "D F -> F D")):
        found[f"mlp.shared.{part}"] = Tensor(f"{inside}shared_experts.{part}_proj.weight", layout)
    return found | {"mlp.router_bias": Tensor(f"{inside}e_score_correction_bias")}


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    name = re.sub(r"\.self_attn\.index_([qk]_(proj|norm))\.", r".self_attn.indexer.\1.", name)
    return name.replace(".block_sparse_moe.", ".mlp.")


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """What sees."""
    del text
    return re.compile(r"(model\.)?(patch_merge_mlp|multi_modal_projector)\.")
