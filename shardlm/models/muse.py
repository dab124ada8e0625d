"""Muse Glimmer (transformers' modeling_muse_glimmer.py is the definition), the part that reads text: norms before and
after each layer, those after with an eps of their own, norms without a scale on the embedding and on queries and keys,
a gate on attention's output, windows, layers without rotation, a soft cap on logits."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig
from shardlm.ops.rope import Rope

SCALE, OUT = 3.87, 0.19611613513818404  # of queries and of logits, where config.json does not say


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` muse_glimmer_text."""
    options.where_absent(head_dim=128, sliding_window=2048, hidden_activation="silu")
    last, own = options("num_hidden_layers") - 1, hf_decoder.rms(options)
    norm, plain = dataclasses.replace(own, offset=1.0), dataclasses.replace(own, scaled=False)
    behind = NormConfig("rms", float(options("post_norm_eps", 1e-8)), 1.0)
    usual = hf_decoder.attention(options, length, qk_norm="head", norm=plain, gate=True)
    usual = dataclasses.replace(usual, scale=float(options("qk_scale_factor", SCALE)) * usual.head_dim**-0.5)
    windows = hf_decoder.sliding(options, lambda layer: (last - layer) % 4 > 0)
    ropes = _ropes(options, usual)
    mlp = hf_decoder.mlp(options, "hidden_activation")
    cap = float(options("final_logit_softcapping", 20.0))
    logits = LogitsConfig(float(options("output_multiplier", OUT)), cap)

    def block(layer: int) -> BlockConfig:
        attention = dataclasses.replace(usual, window=windows[layer], rope=ropes[layer])
        return BlockConfig(attention, mlp, norms="both", post_norm=behind)

    return hf_decoder.decoder(options, block, norm, logits=logits, embed_norm=plain, last_norm=own)


def _ropes(options: Options, usual: AttentionConfig) -> list[Rope | None]:
    """Of each layer, which has the rotation of all where config.json has its base there, or none where it has 0."""
    layers, base = options("num_hidden_layers"), usual.rope.theta
    told = options("layer_rope_theta", [base if (layers - 1 - layer) % 4 else 0 for layer in range(layers)])
    if len(told) != layers or not {0, base}.issuperset(told):
        raise ShardlmError(
            f"config.json has layer_rope_theta={told!r}; it needs num_hidden_layers={layers} of 0 and rope_theta={base}"
        )
    return [usual.rope if one else None for one in told]


def unused(text: Mapping[str, Any]) -> re.Pattern:
    """What sees."""
    del text
    return re.compile(r"(model\.)?vision_(adapter|projection)\.")


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    gate = dataclasses.replace(found["attention.wq"], name=f"{LAYER}self_attn.gate_proj.weight")
    return found | {"attention.wg": gate}
