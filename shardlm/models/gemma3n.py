"""Gemma 3n, text (transformers' modeling_gemma3n.py is the definition): Gemma 3's layers with values normed too and
scores without a scale, around four streams of which a layer reads one (layers/altup.py), and inputs of each layer's
own; the last layers read the keys and values of earlier ones, and few of the first layers' hidden numbers are above 0.
"""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.altup import AltUpConfig
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.layer_inputs import LayerInputsConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import gemma, hf_decoder
from shardlm.models.gemma4 import FULL, SLIDING, check_readers, input_names
from shardlm.models.gemma4 import unused as unused
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig
from shardlm.ops.rope import Rope


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gemma3n_text."""
    options.where_absent(final_logit_softcapping=30.0, sliding_window=512)
    for name in ("query_pre_attn_scalar", "altup_lr_multiplier"):  # of Gemma 3 and of training
        options(name, None)
    layers, reading = options("num_hidden_layers"), options("num_kv_shared_layers", 15)
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % 5 != 0)
    kinds = [SLIDING if window else FULL for window in windows]
    last = check_readers(kinds, reading)
    norm, streams, inputs = hf_decoder.rms(options), _streams(options), _inputs(options)
    attentions = {
        window: hf_decoder.attention(
            options, window=window, rope=_rope(options, window > 0, length), scale=1.0, qk_norm="head", norm=norm,
            value_norm=True,
        )
        for window in dict.fromkeys(windows)
    }  # fmt: skip
    networks = _networks(options)

    def attention(layer: int) -> AttentionConfig:
        own, kind = attentions[windows[layer]], kinds[layer]
        if layer >= layers - reading:
            return dataclasses.replace(own, reads=kind)
        return dataclasses.replace(own, keeps=kind) if last.get(kind) == layer else own

    def block(layer: int) -> BlockConfig:
        return BlockConfig(attention(layer), networks[layer], norms="both", inputs=inputs, streams=streams)

    scale, cap = float(options("hidden_size")) ** 0.5, float(options("final_logit_softcapping", 0.0))
    return hf_decoder.decoder(
        options, block, norm, True, embed_scale=scale, logits=LogitsConfig(softcap=cap), inputs=inputs, streams=streams
    )


def _streams(options: Options) -> AltUpConfig:
    return AltUpConfig(
        count=options("altup_num_inputs", 4),
        active=options("altup_active_idx", 0),
        clip=float(options("altup_coef_clip", 0.0)),
        scaled=bool(options("altup_correct_scale", True)),
        rank=options("laurel_rank", 64),
        norm=NormConfig("rms", options("rms_norm_eps")),
    )


def _inputs(options: Options) -> LayerInputsConfig:
    dim, vocab = options("hidden_size_per_layer_input", 256), options("vocab_size_per_layer_input", 262_144)
    return LayerInputsConfig(dim, options.activation("hidden_activation"), vocab, fewer=vocab < options("vocab_size"))


def _networks(options: Options) -> list[MlpConfig]:
    """Of each layer, of whose widths there is a list, or one for all."""
    layers, activation = options("num_hidden_layers"), options.activation("hidden_activation")
    options.asked.add("intermediate_size")
    widths = options.values.get("intermediate_size")
    widths = widths if isinstance(widths, list) else [options("intermediate_size")] * layers
    usual = [0.95 if layer < 10 < layers else 0.0 for layer in range(layers)]
    shares = options("activation_sparsity_pattern", usual)
    shares = shares if isinstance(shares, list) else [shares] * layers
    for name, found in (("intermediate_size", widths), ("activation_sparsity_pattern", shares)):
        if len(found) != layers:
            raise ShardlmError(f"config.json has {name}={found!r}; it needs num_hidden_layers={layers} numbers")
    return [MlpConfig(width, activation, sparsity=float(share)) for width, share in zip(widths, shares, strict=True)]


def _rope(options: Options, windowed: bool, length: int) -> Rope:
    """Of the layers with a window, which are never stretched by the older options, or of those without."""
    local = float(options("rope_local_base_freq", 10_000.0))
    if options("rope_parameters", None):
        return rope_of(options, options("head_dim"), SLIDING if windowed else FULL, length)
    options("rope_theta")
    return Rope(local) if windowed else rope_of(options, options("head_dim"), FULL, length)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    altup, laurel = f"{LAYER}altup.", f"{LAYER}laurel."
    return {
        **gemma.names(config, block),
        **input_names(),
        "altup.router": Tensor(f"{altup}modality_router.weight", "S D -> D S"),
        "altup.router_norm.scale": Tensor(f"{altup}router_norm.weight"),
        "altup.predict": Tensor(f"{altup}prediction_coefs.weight", "(C A) P -> P C A"),
        "altup.correct": Tensor(f"{altup}correction_coefs.weight", "C P -> P C"),
        "altup.scale": Tensor(f"{altup}correct_output_scale"),
        "laurel.down": Tensor(f"{laurel}linear_left.weight", "R D -> D R"),
        "laurel.up": Tensor(f"{laurel}linear_right.weight", "D R -> R D"),
        "laurel.norm.scale": Tensor(f"{laurel}post_laurel_norm.weight"),
        "altup_ends.into": Tensor("model.altup_projections.{expert}.weight", "O I -> E I O"),
        "altup_ends.out": Tensor("model.altup_unembed_projections.{expert}.weight", "O I -> E I O"),
    }
