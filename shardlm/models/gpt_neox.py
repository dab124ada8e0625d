"""GPT-NeoX (https://arxiv.org/abs/2204.06745) and Pythia (https://arxiv.org/abs/2304.01373): attention and a plain GELU
side by side, each after a layer norm of its own, biases, and a rotation of a part of each head."""

import re
from collections.abc import Mapping
from typing import Any

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import Names, Tensor, linear
from shardlm.models.transformer_config import TransformerConfig

LAYER = "gpt_neox.layers.{layer}."


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gpt_neox. Older options say of the rotation `rotary_pct` and `rotary_emb_base`."""
    for name in ("hidden_dropout", "classifier_dropout"):  # of training, and of another head
        options(name, None)
    older = {"rope_theta": options("rotary_emb_base", None), "partial_rotary_factor": options("rotary_pct", None)}
    options.where_absent(**{name: value for name, value in older.items() if value is not None})
    heads, side_by_side = options("num_attention_heads"), bool(options("use_parallel_residual", True))
    head_dim, bias = options("hidden_size") // heads, bool(options("attention_bias", True))
    rope = rope_of(options, head_dim, length=length, partial=0.25)
    attention = AttentionConfig(heads, heads, head_dim, rope, bias=bias, out_bias=bias)
    network = MlpConfig(options("intermediate_size"), options.activation(), gated=False, bias=True)
    block = BlockConfig(attention, network, parallel=side_by_side, norms_apart=side_by_side)
    return hf_decoder.decoder(options, lambda layer: block, NormConfig("layer", options("layer_norm_eps", 1e-5)))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    """Queries, keys and values of a head are made one after the other by one matrix."""
    theirs, H = f"{LAYER}attention.query_key_value", block.attention.head_dim
    found = {"embedding": Tensor("gpt_neox.embed_in.weight"), "head": Tensor("embed_out.weight", "V D -> D V")}
    for place, letter in enumerate("qkv"):
        inner = ("H", place * H, 3 * H)
        found[f"attention.w{letter}"] = Tensor(f"{theirs}.weight", "(N H) D -> D N H", inner=inner)
        found[f"attention.b{letter}"] = Tensor(f"{theirs}.bias", "(N H) -> N H", inner=inner)
    found |= linear("attention.wo", f"{LAYER}attention.dense", "o")
    found |= linear("mlp.up", f"{LAYER}mlp.dense_h_to_4h", "into")
    found |= linear("mlp.down", f"{LAYER}mlp.dense_4h_to_h", "out")
    norms = {"attention_norm": f"{LAYER}input_layernorm", "mlp_norm": f"{LAYER}post_attention_layernorm"}
    norms["final_norm"] = "gpt_neox.final_layer_norm"
    for ours, name in norms.items():
        found |= {f"{ours}.scale": Tensor(f"{name}.weight"), f"{ours}.bias": Tensor(f"{name}.bias")}
    return found


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """Buffers of masks and rotations."""
    del text
    return re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$")
