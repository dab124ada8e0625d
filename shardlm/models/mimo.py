"""MiMo-V2-Flash (https://github.com/XiaomiMiMo/MiMo-V2-Flash): values narrower than keys and scaled, a third of each
head rotated; layers with a window have twice the heads of keys and sinks, between layers that see everything; a dense
layer, then experts as DeepSeek V3's without shared ones."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options, rope_of
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope

ROTATED = 0.334  # of each head
# Options of the published ones besides, as transformers computes them.
FIXED = {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "n_shared_experts": None}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mimo_v2_flash."""
    options.only_all(FIXED)
    said = options("layernorm_epsilon", 1e-5)
    options.values = {"rms_norm_eps": said, **options.values}  # the published name is another
    layers, windows = options("num_hidden_layers"), _windows(options)
    own = {"value_width": options("v_head_dim"), "value_scale": float(options("attention_value_scale", 1.0))}
    usual = hf_decoder.attention(options, rope=_rope(options, False, length), out_bias=False, **own)
    windowed = {"rope": _rope(options, True, length), "num_kv_heads": 2 * usual.num_kv_heads, "sinks": True}
    sizes = {"num_attention_heads": usual.num_heads, "head_dim": usual.head_dim, "v_head_dim": usual.value_width}
    for name, size in (sizes | {"num_key_value_heads": windowed["num_kv_heads"]}).items():
        options.only(f"swa_{name}", size)

    def attention(layer: int) -> AttentionConfig:
        return dataclasses.replace(usual, window=windows[layer], **windowed) if windows[layer] else usual

    mixed = options("moe_layer_freq", [0] + [1] * (layers - 1))
    first = mixed.index(1) if 1 in mixed else layers
    options.only("moe_layer_freq", [0] * first + [1] * (layers - first))
    sparse = deepseek.experts_of(options, third=True, normalize=True)
    return deepseek.decoder(options, attention, sparse, first=first)


def _windows(options: Options) -> list[int]:
    """Of each layer; by the published options a window counts the tokens before."""
    size, pattern = options("sliding_window_size", 0), options("hybrid_layer_pattern", None)
    found = hf_decoder.sliding(options, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    if pattern is not None and options("layer_types", None) is None:
        if len(pattern) != len(found):
            raise ShardlmError(
                f"config.json has hybrid_layer_pattern={pattern!r}; it needs num_hidden_layers={len(found)} of 0, 1"
            )
        found = [options("sliding_window") if windowed else 0 for windowed in pattern]
    return [size + 1 if size and window else window for window in found]


def _rope(options: Options, windowed: bool, length: int) -> Rope:
    """Of the layers with a window, or of the others; the published options say each base by itself."""
    head_dim, kind = options("head_dim"), "sliding_attention" if windowed else "full_attention"
    if options("rope_parameters", None):
        return rope_of(options, head_dim, kind, length, partial=ROTATED)
    bases = options("rope_theta", 5_000_000.0), options("swa_rope_theta", 10_000.0)
    options.only("rope_scaling", None)
    return Rope(float(bases[windowed]), dim=int(head_dim * options("partial_rotary_factor", ROTATED)))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return {**deepseek.names(config, block), "attention.sinks": Tensor(f"{LAYER}self_attn.attention_sink_bias")}
