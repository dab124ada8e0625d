"""Mistral 4: DeepSeek's latent attention, whose queries grow with their position, and experts chosen by a softmax, all
of a layer's in two tensors."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import deepseek
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor
from shardlm.models.transformer_config import TransformerConfig


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mistral4."""
    options.only("n_group", 1)
    return deepseek.from_hf(options, length)


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    found = deepseek.names(config, block)
    return found | together(block.mlp) if isinstance(block.mlp, MoeConfig) else found


def together(mixture: MoeConfig) -> Names:
    """Experts of a layer in two tensors."""
    F, both = mixture.expert_dim, Tensor(f"{LAYER}mlp.experts.gate_up_proj", "E F D -> E D F")
    return {
        "mlp.gate": dataclasses.replace(both, part=(1, 0, F, 1)),
        "mlp.up": dataclasses.replace(both, part=(1, F, 2 * F, 1)),
        "mlp.down": Tensor(f"{LAYER}mlp.experts.down_proj", "E D F -> E F D"),
    }
