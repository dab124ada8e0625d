"""Mistral Large 4, text (transformers' modeling_mistral_large4.py is the definition): DeepSeek V3.2's attention to
chosen tokens, whose queries and whose indexer's are made of the stream and grow with the logarithm of their position as
each head has learned; rotations by frequencies that are learned, in three of four layers; a dense layer, then experts
chosen by a softmax."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.indexer import IndexerConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.deepseek_sparse import shared_layers
from shardlm.models.hf_options import Options
from shardlm.models.naming import NUMBERED, Names, Tensor, gated, renamed
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig

LAYER = "layers.{layer}."
OF_STREAM = NormConfig("layer", 1e-6)
ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2048.0, "original_max_position_embeddings": 512}
ROPE |= {"attention_factor": 1.0}  # where config.json says nothing
ASIDE = ("head_dim", "qk_head_dim", "num_key_value_heads")  # told by other options


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mistral_large4_text."""
    options.only_all({"attention_bias": False, "n_group": 1, "topk_group": 1, "rope_interleave": True})
    options.where_absent(final_logit_softcapping=30.0)
    if not any(options.values.get(name) for name in ("rope_parameters", "rope_scaling", "rope_theta")):
        options.values = {**options.values, "rope_parameters": ROPE}
    options.aside(*ASIDE)
    layers, norm = options("num_hidden_layers"), hf_decoder.rms(options)
    options.only("kv_source_layers", None, list(range(layers)))
    turned, shared = _turned(options), shared_layers(options)
    latent = dataclasses.replace(deepseek.latent(options, length), norm=norm, by_logarithm=True)
    still = dataclasses.replace(
        latent,
        nope_dim=latent.nope_dim + latent.rope_dim,
        rope_dim=0,
        rope=None,
        scale=latent.scale or latent.head_dim**-0.5,
        room=latent.kv_latent_dim + latent.rope_dim if any(turned) else 0,
    )
    rope = dataclasses.replace(latent.rope, dim=latent.rope_dim)
    sizes = options("index_n_heads", 32), options("index_head_dim", 128), options("index_topk", 2048)
    own = IndexerConfig(*sizes, rope, of_stream=OF_STREAM, by_logarithm=True)

    def attention(layer: int) -> MlaConfig:
        indexer = dataclasses.replace(own, rope=rope if turned[layer] else None, shared=shared[layer])
        return dataclasses.replace(latent if turned[layer] else still, indexer=indexer)

    mixed, dense = deepseek.mixed_layers(options, first=1), hf_decoder.mlp(options)
    sparse = deepseek.experts_of(options, third=False, normalize=True)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(attention(layer), sparse if mixed[layer] else dense)

    cap = LogitsConfig(softcap=float(options("final_logit_softcapping", 0.0)))
    return hf_decoder.decoder(options, block, norm, logits=cap, frequencies=latent.rope_dim // 2)


def _turned(options: Options) -> list[bool]:
    """Which layers have a rotation."""
    layers, period = options("num_hidden_layers"), options("no_rope_layer_interval", 4)
    told = options("no_rope_layers", [int((layer + 1) % period != 0) for layer in range(layers)])
    if len(told) < layers or not {0, 1}.issuperset(told):
        raise ShardlmError(
            f"config.json has no_rope_layers={told!r}; it needs num_hidden_layers={layers} of 0, 1, or more"
        )
    return [bool(one) for one in told[:layers]]


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    """As published, which is how transformers writes it too."""
    own, theirs, index = block.attention, f"{LAYER}attention.", f"{LAYER}attention.indexer."
    both = own.nope_dim + own.value_dim
    found = {
        "embedding": Tensor("tok_embeddings.weight"),
        "head": Tensor("output.weight", "V D -> D V"),
        "final_norm.scale": Tensor("norm.weight"),
        "faster": Tensor("lerope.alpha"),
        "attention_norm.scale": Tensor(f"{LAYER}attention_norm.weight"),
        "mlp_norm.scale": Tensor(f"{LAYER}ffn_norm.weight"),
        "attention.wq": Tensor(f"{theirs}wq.weight", "(N H) D -> D N H", pairs=_pairs("H", own.nope_dim, own.rope_dim)),
        "attention.wkv_down": Tensor(
            f"{theirs}wkv_a_with_mqa.weight", "X D -> D X", pairs=_pairs("X", own.kv_latent_dim, own.rope_dim)
        ),
        "attention.kv_norm.scale": Tensor(f"{theirs}kv_a_norm.weight"),
        "attention.wk_up": Tensor(f"{theirs}wkv_b.weight", "(N H) R -> R N H", inner=("H", 0, both)),
        "attention.wv_up": Tensor(f"{theirs}wkv_b.weight", "(N H) R -> R N H", inner=("H", own.nope_dim, both)),
        "attention.wo": Tensor(f"{theirs}wo.weight", "D (N H) -> N H D"),
    }
    turned = _pairs("H", 0, own.indexer.rope.dim) if own.indexer.rope else None
    found |= {
        "attention.indexer.wq": Tensor(f"{index}wq_b.weight", "(N H) Q -> Q N H", pairs=turned),
        "attention.indexer.wk": Tensor(f"{index}wk.weight", "H D -> D H", pairs=turned),
        "attention.indexer.heads": Tensor(f"{index}weights_proj.weight", "N D -> D N"),
    }
    for part, letter in (("scale", "weight"), ("bias", "bias")):
        found[f"attention.indexer.k_norm.{part}"] = Tensor(f"{index}k_norm.{letter}", "H -> H", pairs=turned)
        found[f"attention.indexer.q_norm.{part}"] = Tensor(f"{index}q_input_norm.{letter}")
    for part, letter in (("growth", "s"), ("start", "b")):
        found[f"attention.{part}"] = Tensor(f"{theirs}ssmax_scaling.{letter}")
        found[f"attention.indexer.{part}"] = Tensor(f"{index}ssmax_scaling.{letter}")
    return found | _network_names(block)


def _pairs(letter: str, first: int, size: int) -> tuple[str, int, int] | None:
    return (letter, first, size) if size else None


def _network_names(block: BlockConfig) -> Names:
    if not isinstance(block.mlp, MoeConfig):
        return gated("mlp.", f"{LAYER}feed_forward.", **NUMBERED)
    router = {"mlp.router": Tensor(f"{LAYER}gate.weight", "E D -> D E")}
    own = gated("mlp.", f"{LAYER}experts.{{expert}}.", **NUMBERED)
    return router | own | gated("mlp.shared.", f"{LAYER}shared_experts.", **NUMBERED)


def published_name(name: str) -> str:
    """As it is."""
    return name


MODULES_OF = (  # of transformers, in which PEFT's files have them
    (r"^layers\.", "model.layers."),
    (r"\.attention\.", ".self_attn."),
    (r"\.wq\.", ".q_proj."),
    (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
    (r"\.wkv_b\.", ".kv_b_proj."),
    (r"\.wo\.", ".o_proj."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.shared_experts\.", ".mlp.shared_experts."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)


def module_name(name: str) -> str:
    """As transformers has a tensor that is published as another."""
    return renamed(name, MODULES_OF)


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """What sees."""
    del text
    return re.compile(r"(vision_encoder|vision_language_adapter|patch_merger|pre_mm_projector_norm)\.")
