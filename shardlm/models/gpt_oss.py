"""GPT-OSS (https://arxiv.org/abs/2508.10925): attention sinks, a window in every other layer, experts with biases and a
clamped gate."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import LAYER, Names, Tensor, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.swiglu import ALPHA, LIMIT


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` gpt_oss."""
    options.only("swiglu_limit", LIMIT)
    options.only("swiglu_alpha", ALPHA)
    options.only("hidden_act", "silu")
    options("experts_per_token", None)  # the same number, twice
    windows = hf_decoder.sliding(options, lambda layer: layer % 2 == 0)
    mixture = MoeConfig(
        num_experts=options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        balance_loss=float(options("router_aux_loss_coef", 0.0)),
        activation="clamped",
        bias=True,
    )

    def block(layer: int) -> BlockConfig:
        return BlockConfig(hf_decoder.attention(options, length, window=windows[layer], sinks=True), mixture)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    F = block.mlp.expert_dim
    experts = f"{LAYER}mlp.experts."
    found = standard() | {
        "attention.sinks": Tensor(f"{LAYER}self_attn.sinks"),
        "mlp.router": Tensor(f"{LAYER}mlp.router.weight", "E D -> D E"),
        "mlp.logit_bias": Tensor(f"{LAYER}mlp.router.bias"),
        "mlp.down": Tensor(f"{experts}down_proj"),
        "mlp.down_bias": Tensor(f"{experts}down_proj_bias"),
    }
    for first, name in enumerate(("gate", "up")):  # interleaved
        weight = Tensor(f"{experts}gate_up_proj", part=(2, first, 2 * F, 2))
        found[f"mlp.{name}"] = weight
        found[f"mlp.{name}_bias"] = dataclasses.replace(
            weight, name=f"{experts}gate_up_proj_bias", part=(1, first, 2 * F, 2)
        )
    return found
