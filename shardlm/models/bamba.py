"""Bamba (https://github.com/foundation-model-stack/bamba): Llama's decoder with Mamba 2 in most layers; of heads in
the others half is rotated."""

from shardlm.errors import ShardlmError
from shardlm.layers.block import BlockConfig
from shardlm.layers.mamba import MambaConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.mamba import mamba_names, memory_of
from shardlm.models.naming import LAYER, Names, Tensor, linear, standard
from shardlm.models.transformer_config import TransformerConfig

ASIDE = ("num_logits_to_keep", "z_loss_coefficient")  # what is computed, and of training
ROTATED = 0.5  # of each head, where config.json does not say


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` bamba."""
    options.aside(*ASIDE)
    norm, layers = hf_decoder.rms(options), options("num_hidden_layers")
    attention, feed_forward = hf_decoder.attention(options, length, partial=ROTATED), hf_decoder.mlp(options)
    attends = set(options("attn_layer_indices", ()))
    if not attends <= set(range(layers)):
        raise ShardlmError(
            f"config.json has attn_layer_indices={sorted(attends)}; it needs numbers from 0 to num_hidden_layers - 1 = "
            f"{layers - 1}"
        )
    memory = memory_of(options, norm)
    return hf_decoder.decoder(
        options, lambda layer: BlockConfig(attention if layer in attends else memory, feed_forward), norm
    )


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = standard(mlp_norm="pre_ff_layernorm") | {"final_norm.scale": Tensor("model.final_layernorm.weight")}
    for part, kind in (("gate", "into"), ("up", "into"), ("down", "out")):
        found |= linear(f"mlp.{part}", f"{LAYER}feed_forward.{part}_proj", kind)
    return found | (mamba_names(block.attention, f"{LAYER}mamba.") if isinstance(block.attention, MambaConfig) else {})
