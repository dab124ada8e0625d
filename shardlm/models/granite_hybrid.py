"""Granite 4 (https://huggingface.co/collections/ibm-granite/granite-40-language-models): Granite's decoder (granite.py)
with Mamba 2 in most layers; the others attend to tokens, usually without a rotation. A shared feed-forward layer in
each, and beside it experts or none."""

import dataclasses

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import granite, hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.mamba import mamba_names, memory_of
from shardlm.models.naming import LAYER, Names, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.cross_entropy import LogitsConfig

# By the names of transformers, and by those of published ones.
LINEAR, FULL = ("linear_attention", "mamba"), ("full_attention", "attention")


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` granitemoehybrid."""
    norm, scale = hf_decoder.rms(options), float(options("residual_multiplier", 1.0))
    own = {"scale": float(options("attention_multiplier", 1.0))}
    options.only("position_embedding_type", None, "nope", "rope")
    attention = hf_decoder.attention(options, length, **own)
    if options("position_embedding_type", "nope") == "nope":
        attention = dataclasses.replace(attention, rope=None)
    linear, memory, feed_forward = _linear(options), memory_of(options, norm), _feed_forward(options)
    return hf_decoder.decoder(
        options,
        lambda layer: BlockConfig(memory if linear[layer] else attention, feed_forward, residual_scale=scale),
        norm,
        embed_scale=float(options("embedding_multiplier", 1.0)),
        logits=LogitsConfig(scale=1 / options("logits_scaling", 1.0)),
    )


def _linear(options: Options) -> list[bool]:
    """Which layers are Mamba 2."""
    layers = options("num_hidden_layers")
    kinds = options("layer_types", None) or options("layers_block_type", None) or [LINEAR[0]] * layers
    options("layers_block_type", None)
    if len(kinds) != layers or not {*LINEAR, *FULL}.issuperset(kinds):
        raise ShardlmError(
            f"config.json has layer_types={kinds!r}; it needs num_hidden_layers={layers} of "
            f"{', '.join((*LINEAR, *FULL))}"
        )
    return [kind in LINEAR for kind in kinds]


def _feed_forward(options: Options) -> MlpConfig | MoeConfig:
    options.asked |= {"num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "intermediate_size"}
    shared = options("shared_intermediate_size", 1024)
    if options.values.get("num_local_experts") == 0:
        return MlpConfig(shared, options.activation())
    return granite.experts_of(options)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard()
    if isinstance(block.attention, MambaConfig):
        found |= mamba_names(block.attention, f"{LAYER}mamba.")
    if isinstance(block.mlp, MoeConfig):
        return found | granite.experts_names(block.mlp, published=True) | granite.shared_names(block.mlp.shared_dim)
    theirs = granite.shared_names(block.mlp.mlp_dim)
    return found | {path.replace("mlp.shared.", "mlp."): tensor for path, tensor in theirs.items()}
