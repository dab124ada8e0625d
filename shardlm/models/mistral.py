"""Mistral (https://arxiv.org/abs/2310.06825): Llama's decoder with a sliding window; Ministral 3
(https://arxiv.org/abs/2601.08584): without one, with queries that grow with their position; and CWM
(https://arxiv.org/abs/2510.02387), every fourth of whose layers sees everything."""

from shardlm.layers.block import BlockConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options, growth_of
from shardlm.models.naming import Names, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import QueryGrowth

WINDOWS = {"ministral": 4096, "cwm": 8192}  # where config.json says nothing


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mistral, ministral (Ministral 8B), ministral3 and cwm."""
    every = options("model_type") == "cwm"
    if usual := WINDOWS.get(options("model_type")):
        options.where_absent(sliding_window=usual)
    if every and not options("rope_parameters", None):
        options("rope_theta")
    windows = hf_decoder.sliding(options, lambda layer: layer % 4 > 0 if every else True)
    feed_forward, growth = hf_decoder.mlp(options), _growth(options)

    def block(layer: int) -> BlockConfig:
        own = {"window": windows[layer], "query_growth": growth}
        return BlockConfig(hf_decoder.attention(options, length, **own), feed_forward)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options))


def _growth(options: Options) -> QueryGrowth | None:
    return growth_of(options, options("rope_parameters", {})) if options("model_type") == "ministral3" else None


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard()
