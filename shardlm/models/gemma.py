"""Gemma (https://arxiv.org/abs/2403.08295): a GELU gate and a scaled embedding. Gemma 2 and 3, text
(https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2503.19786): norms before and after each layer too, and sliding
windows between layers that see everything; 2 has soft-capped scores and logits, 3 norms on queries and keys and its own
rotation for each kind of layer."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig
from shardlm.ops.rope import Rope


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gemma, gemma2 and gemma3_text; vaultgemma, 2 with norms before layers alone."""
    if options("model_type") == "gemma":
        return _first(options, length)
    third = options("model_type") == "gemma3_text"
    options.only("use_bidirectional_attention", False)
    options("hidden_act", None), options("sliding_window_size", None)  # repeat hidden_activation and sliding_window
    norm, norms = hf_decoder.rms(options, offset=1.0), "pre" if options("model_type") == "vaultgemma" else "both"
    feed_forward = hf_decoder.mlp(options, "hidden_activation")
    usual = options("_sliding_window_pattern", 6 if third else 2)
    period = options("sliding_window_pattern", usual)
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % period != 0)
    ropes = {windowed: _rope(options, windowed, length) for windowed in (True, False)}
    own = {
        "scale": options("query_pre_attn_scalar") ** -0.5,
        "softcap": float(options("attn_logit_softcapping", 0.0)),
        "qk_norm": "head" if third else "none",
        "norm": norm,
    }

    def block(layer: int) -> BlockConfig:
        attention = hf_decoder.attention(options, window=windows[layer], rope=ropes[windows[layer] > 0], **own)
        return BlockConfig(attention, feed_forward, norms=norms)

    scale, cap = float(options("hidden_size")) ** 0.5, float(options("final_logit_softcapping", 0.0))
    return hf_decoder.decoder(options, block, norm, True, embed_scale=scale, logits=LogitsConfig(softcap=cap))


def _first(options: Options, length: int) -> TransformerConfig:
    options.only("use_bidirectional_attention", None, False)
    options.only("hidden_act", "gelu_pytorch_tanh", "gelu")  # the first checkpoints say gelu and mean the other
    options.only("hidden_activation", None, "gelu_pytorch_tanh")
    feed_forward = dataclasses.replace(hf_decoder.mlp(options), activation="gelu_tanh")
    block = BlockConfig(hf_decoder.attention(options, length), feed_forward)
    norm, scale = hf_decoder.rms(options, offset=1.0), float(options("hidden_size")) ** 0.5
    return hf_decoder.decoder(options, lambda layer: block, norm, True, embed_scale=scale)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    if block.norms == "pre":
        return standard()
    return standard(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )


def _rope(options: Options, windowed: bool, length: int) -> Rope:
    """Of the layers with a window, or of those without."""
    local = options("rope_local_base_freq", 0)  # the older form: layers with a window are never stretched
    if windowed and local:
        return Rope(float(local))
    group = "sliding_attention" if windowed else "full_attention"
    return rope_of(options, options("head_dim"), group, length)
