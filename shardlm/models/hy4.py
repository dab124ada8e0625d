"""Hy4 (transformers' modeling_hy_v4.py is the definition): DeepSeek V3.2's attention to chosen tokens, with a gate on
each number of its output and learned sinks; several streams that are not mixed; a dense layer, then experts as DeepSeek
V3's, whose hidden numbers have limits."""

import dataclasses
import re

from shardlm.layers.block import BlockConfig
from shardlm.layers.hyper_connections import StreamsConfig
from shardlm.layers.indexer import IndexerConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.deepseek_sparse import shared_layers
from shardlm.models.hf_options import Options
from shardlm.models.mistral4 import together
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig

# How sinks begin, sizes that other options tell, and modules that predict further tokens, which are left aside.
ASIDE = ("learnable_sink_init", "head_dim", "qk_head_dim", "num_key_value_heads")
ASIDE += ("num_nextn_predict_layers", "num_mtp_layers")
OTHERWISE_WRITTEN = (
    "save_pretrained of transformers 5.24 writes gate_proj of dense layers and of shared experts as linear_gate, the "
    "name of attention's gate: rename those tensors"
)


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` hy_v4."""
    options.where_absent(routed_scaling_factor=2.827)
    options.only("attention_bias", False)
    options.only("n_group", 1)
    options.aside(*ASIDE)
    norm, shared = hf_decoder.rms(options), _shared(options)
    latent = dataclasses.replace(deepseek.latent(options, length), gate="number", sinks=True)
    rope = dataclasses.replace(latent.rope, dim=latent.rope_dim)
    sizes = options("index_n_heads", 16), options("index_head_dim", 128), options("index_topk", 2048)
    own = IndexerConfig(*sizes, rope, NormConfig("layer", norm.eps), of_tail=True)
    streams = StreamsConfig(
        options("hc_mult", 4), 0, float(options("hc_eps", 1e-6)), norm.eps, float(options("hc_magnitude", 2.0))
    )
    mixed, dense, sparse = deepseek.mixed_layers(options, first=1), hf_decoder.mlp(options), _experts(options)

    def attention(layer: int) -> MlaConfig:
        return dataclasses.replace(latent, indexer=dataclasses.replace(own, shared=shared[layer]))

    def block(layer: int) -> BlockConfig:
        return BlockConfig(attention(layer), sparse if mixed[layer] else dense, streams=streams)

    return hf_decoder.decoder(options, block, norm, streams=streams)


def _shared(options: Options) -> list[bool]:
    """Which layers attend to what the indexer of one before them chose: of four all but the first, behind the first."""
    if options("indexer_types", None) is None:
        return [layer > 0 and (layer - 1) % 4 > 0 for layer in range(options("num_hidden_layers"))]
    return shared_layers(options)


def _experts(options: Options) -> MoeConfig:
    found, limit = deepseek.experts_of(options, third=True, normalize=True), float(options("swiglu_limit", 10.0))
    return dataclasses.replace(found, activation="silu_of_cut", limit=limit) if limit > 0 else found


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    theirs, index = f"{LAYER}self_attn.", f"{LAYER}self_attn.indexer."
    found = deepseek.names(config, block)
    found = {path: dataclasses.replace(tensor, pairs=None) for path, tensor in found.items()} | {
        "attention.wg": Tensor(f"{theirs}linear_gate.weight", "(N H) D -> D N H"),
        "attention.sinks": Tensor(f"{theirs}learnable_sink_param"),
        "attention.indexer.wq": Tensor(f"{index}wq_b.weight", "(N H) Q -> Q N H"),
        "attention.indexer.wk": Tensor(f"{index}wk.weight", "H D -> D H"),
        "attention.indexer.heads": Tensor(f"{index}weights_proj.weight", "N D -> D N"),
        "attention.indexer.k_norm.scale": Tensor(f"{index}k_norm.weight"),
        "attention.indexer.k_norm.bias": Tensor(f"{index}k_norm.bias"),
        "head_streams.fn": Tensor("model.hc_pre.hc_head.hc_head_fn", "S I -> I S"),
        "head_streams.base": Tensor("model.hc_pre.hc_head.hc_head_base"),
        "head_streams.scale": Tensor("model.hc_pre.hc_head.hc_head_scale"),
    }
    for ours, short in (("attention", "attn"), ("mlp", "mlp")):
        where = f"{LAYER}hc_pre.hc_{short}_layer.hc_"
        found[f"{ours}_streams.fn"] = Tensor(f"{where}fn", "S I -> I S")
        found |= {f"{ours}_streams.{name}": Tensor(f"{where}{name}") for name in ("base", "scale")}
    return found | together(block.mlp) if isinstance(block.mlp, MoeConfig) else found


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    return re.sub(r"\.self_attn\.linear_gate\.", ".self_attn.gate_proj.", name)
