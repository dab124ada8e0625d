"""Mixtral (https://arxiv.org/abs/2401.04088): Llama's decoder with a mixture of experts in every layer."""

import dataclasses

from shardlm.layers.attention import AttentionConfig
from shardlm.layers.block import BlockConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.norm import NormConfig
from shardlm.layers.stack import Segment
from shardlm.models import hf_decoder
from shardlm.models.hf_options import Options
from shardlm.models.naming import NUMBERED, Names, experts, standard
from shardlm.models.transformer_config import TransformerConfig
from shardlm.ops.rope import Rope


@dataclasses.dataclass(frozen=True)
class MixtralConfig:
    """Sizes of a Mixtral-style decoder; the defaults are Mixtral 8x7B."""

    vocab_size: int = 32_000
    embed_dim: int = 4096
    num_layers: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 14_336
    balance_loss: float = 0.02
    router_z_loss: float = 0.0
    capacity_factor: float = 0.0
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def transformer(self) -> TransformerConfig:
        """The decoder these sizes describe."""
        attention = AttentionConfig(self.num_heads, self.num_kv_heads, self.head_dim, Rope(self.rope_theta))
        experts = MoeConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=self.expert_dim,
            balance_loss=self.balance_loss,
            router_z_loss=self.router_z_loss,
            capacity_factor=self.capacity_factor,
        )
        return TransformerConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            segments=(Segment((BlockConfig(attention, experts),), self.num_layers),),
            norm=NormConfig(eps=self.norm_eps),
            tie_embeddings=self.tie_embeddings,
        )

    def to_hf(self) -> dict:
        """config.json of this model as `transformers` reads it."""
        experts = {
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "router_aux_loss_coef": self.balance_loss,
            "sliding_window": None,
        }
        return hf_decoder.published(self, "MixtralForCausalLM", "mixtral", self.expert_dim) | experts


def from_hf(options: Options, length: int) -> TransformerConfig:
    """`model_type` mixtral."""
    mixture = MoeConfig(
        num_experts=options("num_local_experts"),
        top_k=options("num_experts_per_tok"),
        expert_dim=options("intermediate_size"),
        balance_loss=float(options("router_aux_loss_coef", 0.0)),
        activation=options.activation(),
    )
    windows = hf_decoder.sliding(options, lambda layer: True)

    def block(layer: int) -> BlockConfig:
        return BlockConfig(hf_decoder.attention(options, length, window=windows[layer]), mixture)

    return hf_decoder.decoder(options, block, hf_decoder.rms(options))


def names(config: TransformerConfig, block: BlockConfig) -> Names:
    return standard() | experts("block_sparse_moe", **NUMBERED)
