"""GLM-4.5 to 4.7 (https://arxiv.org/abs/2508.06471) and dots.llm1 (https://arxiv.org/abs/2506.05767): grouped-query
attention, then a few dense layers and experts as DeepSeek V3 has them."""

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.models import deepseek, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names
from shardlm.models.transformer import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` glm4_moe and dots1."""
    glm = options("model_type") == "glm4_moe"
    options.only("moe_layer_freq", 1)
    attention = _glm(options, length) if glm else _dots(options, length)
    experts = deepseek.experts_of(options, third=True, normalize=glm)
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


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return deepseek.names(config, block)
