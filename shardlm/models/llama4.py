"""Llama 4, text (transformers' modeling_llama4.py is the definition): layers that rotate and see the positions of their
own chunk, with a norm without a scale on queries and keys, between layers that do not rotate and see everything, whose
queries grow with their position; and experts of which each token has one, that read it times their weight."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, in_pairs, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import QueryGrowth
from shardlm.ops.routing import Router


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` llama4_text."""
    if not options("rope_parameters", None):
        options("rope_theta")  # whose default differs from Llama's
    rotated, chunked, mixed = _rotated(options), _chunked(options), _mixed(options)
    chunk, norm = options("attention_chunk_size", 0), hf_decoder.rms(options)
    own = {"chunk": 0, "norm": NormConfig("rms", norm.eps, scaled=False), "norm_rotated": True}
    usual = hf_decoder.attention(options, length, **own)
    normed = bool(options("use_qk_norm", True))
    growth = QueryGrowth(float(options("attn_scale", 0.1)), options("floor_scale", 8192), first=1)
    grows = bool(options("attn_temperature_tuning", True))
    sparse = MoeConfig(
        num_experts=options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        shared_dim=options("intermediate_size"),
        router=Router("sigmoid", normalize=False),
        activation=options.activation(),
        weighs_inputs=True,
    )
    dense = MlpConfig(options("intermediate_size_mlp"), options.activation())

    def block(layer: int) -> BlockConfig:
        attention = dataclasses.replace(usual, chunk=chunk if chunked[layer] else 0)
        if rotated[layer]:
            attention = dataclasses.replace(attention, qk_norm="head" if normed else "none")
        else:
            attention = dataclasses.replace(attention, rope=None, query_growth=growth if grows else None)
        return BlockConfig(attention, sparse if layer in mixed else dense)

    return hf_decoder.decoder(options, block, norm)


def _rotated(options: Options) -> list[bool]:
    """Of each layer, by the option that is 1 where it is."""
    layers, every = options("num_hidden_layers"), options("no_rope_layer_interval", 4)
    found = options("no_rope_layers", None) or [int((i + 1) % every != 0) for i in range(layers)]
    return list(map(bool, _of_each(options, "no_rope_layers", found, {0, 1})))


def _chunked(options: Options) -> list[bool]:
    usual = ["chunked_attention" if rotated else "full_attention" for rotated in _rotated(options)]
    found = options("layer_types", None) or usual
    known = {"chunked_attention", "full_attention"}
    return [kind == "chunked_attention" for kind in _of_each(options, "layer_types", found, known)]


def _mixed(options: Options) -> set[int]:
    """The layers that have experts."""
    layers, every = options("num_hidden_layers"), options("interleave_moe_layer_step", 1)
    found = options("moe_layers", None)
    return set(range(every - 1, layers, every) if found is None else found)


def _of_each(options: Options, name: str, found: list, known: set) -> list:
    layers = options("num_hidden_layers")
    if len(found) != layers or not known.issuperset(found):
        works = ", ".join(sorted(map(str, known)))
        raise ShardlmError(f"config.json has {name}={found!r}; it needs num_hidden_layers={layers} of {works}")
    return found


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard()
    found |= in_pairs(found, block.attention.head_dim)
    here = f"{LAYER}feed_forward."
    for part in ("gate", "up", "down"):
        theirs = f"{part}_proj.weight"
        dense = dataclasses.replace(found[f"mlp.{part}"], name=f"{here}{theirs}")
        found |= {
            f"mlp.{part}": dense,
            f"mlp.shared.{part}": dataclasses.replace(dense, name=f"{here}shared_expert.{theirs}"),
        }
    if isinstance(block.mlp, MoeConfig):
        F, both = block.mlp.expert_dim, f"{here}experts.gate_up_proj"
        found |= {
            "mlp.router": Tensor(f"{here}router.weight", "E D -> D E"),
            "mlp.gate": Tensor(both, part=(2, 0, F, 1)),
            "mlp.up": Tensor(both, part=(2, F, 2 * F, 1)),
            "mlp.down": Tensor(f"{here}experts.down_proj"),
        }
    return found
