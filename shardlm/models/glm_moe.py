"""GLM-4.5 to 4.7 (https://arxiv.org/abs/2508.06471), dots.llm1 (https://arxiv.org/abs/2506.05767), Solar Open:
grouped-query attention, then a few dense layers and experts as DeepSeek V3 has them."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` glm4_moe, dots1 and solar_open."""
    kind = options("model_type")
    options.only("moe_layer_freq", 1)
    attention = {"glm4_moe": _glm, "dots1": _dots, "solar_open": _solar}[kind](options, length)
    experts = deepseek.experts_of(options, third=True, normalize=kind != "dots1")
    return deepseek.decoder(options, attention, experts)


def _glm(options: Options, length: int):
    """Norms on queries and keys in some sizes; half of each head is rotated."""
    own = {"qk_norm": "head"} if options("use_qk_norm", False) else {}
    own |= {"norm": hf_decoder.rms(options), "out_bias": False}
    attention = hf_decoder.attention(options, length, partial=0.5, **own)
    return lambda layer: attention


def _dots(options: Options, length: int):
    first = options("max_window_layers", 62)
    windows = hf_decoder.sliding(options, lambda layer: layer >= first)
    own = {"qk_norm": "head", "norm": hf_decoder.rms(options)}

    def attention(layer: int) -> AttentionConfig:
        return hf_decoder.attention(options, length, window=windows[layer], **own)

    return attention


def _solar(options: Options, length: int):
    options.only("use_qk_norm", False)
    options.only("first_k_dense_replace", 0)
    attention = hf_decoder.attention(options, length, out_bias=False)
    return lambda layer: attention


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return deepseek.names(config, block)
