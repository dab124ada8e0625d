"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama's decoder in which every few layers have no rotation
(https://arxiv.org/abs/2501.18795)."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` smollm3."""
    layers, period = options("num_hidden_layers"), options("no_rope_layer_interval", 4)
    rotated = options("no_rope_layers", None) or [int((layer + 1) % period != 0) for layer in range(layers)]
    windows = [0] * layers
    if options("use_sliding_window", False):
        windows = hf_decoder.sliding(options, lambda layer: not rotated[layer])
    options("sliding_window", None), options("layer_types", None)
    feed_forward, plain = hf_decoder.mlp(options), hf_decoder.attention(options, length)

    def block(layer: int) -> BlockConfig:
        attention = hf_decoder.attention(options, window=windows[layer], rope=plain.rope if rotated[layer] else None)
        return BlockConfig(attention, feed_forward)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options), True)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard()
