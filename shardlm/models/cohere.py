"""Command R7B, Command A and Aya (https://arxiv.org/abs/2504.00698): attention and feed-forward side by side after one
layer norm without a bias, sliding windows rotated in adjacent pairs between layers that see everything and are not
rotated, a factor on the logits."""

from shardlm.layers.block import BlockConfig
from shardlm.layers.norm import NormConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import Names, in_pairs, standard
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig

# As all published ones have them; the first is what transformers computes.
FIXED = {
    "use_parallel_block": (True,),
    "use_gated_activation": (True,),
    "use_qk_norm": (False,),
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "order_of_interleaved_layers": ("local_attn_first",),
}


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` cohere2."""
    for name, known in FIXED.items():
        options.only(name, *known)
    options("use_embedding_sharing", None), options("use_parallel_embedding", None)  # of their own code
    period = options("sliding_window_pattern", 0) or options("layer_switch", 4)
    options("layer_switch", None)
    windows = hf_decoder.sliding(options, lambda layer: (layer + 1) % period != 0)
    feed_forward, rope = hf_decoder.mlp(options), hf_decoder.attention(options, length).rope

    def block(layer: int) -> BlockConfig:
        own = {"window": windows[layer], "rope": rope if windows[layer] else None}
        return BlockConfig(hf_decoder.attention(options, **own), feed_forward, parallel=True)

    norm = NormConfig("layer", options("layer_norm_eps"), bias=False)
    return hf_decoder.decoder(options, block, norm, True, logits=LogitsConfig(scale=options("logit_scale", 0.0625)))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard()
    return found | (in_pairs(found, block.attention.head_dim) if block.attention.rope else {})
