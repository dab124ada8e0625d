"""DeepSeek V2 and V3 (https://arxiv.org/abs/2405.04434, https://arxiv.org/abs/2412.19437): latent attention, a few
dense layers, then many small experts with shared ones beside them."""

import dataclasses

from shardlm.layers.block import BlockConfig
from shardlm.layers.mla import MlaConfig
from shardlm.layers.mlp import MlpConfig
from shardlm.layers.moe import MoeConfig
from shardlm.layers.stack import Segment
from shardlm.models.transformer import TransformerConfig
from shardlm.ops.routing import Router, Scoring


@dataclasses.dataclass(frozen=True)
class DeepseekConfig:
    """Sizes of a DeepSeek-style decoder; the defaults are V3's 671B (section 4.2 there).

    dense_layers  first layers with a dense MLP of mlp_dim instead of experts
    num_shared    experts that every token goes through
    groups, top_groups, scoring, routed_scale  see ops/routing.py
    load_bias     even the load by a bias instead of a loss
    """

    vocab_size: int = 129_280
    embed_dim: int = 7168
    num_layers: int = 61
    dense_layers: int = 3
    num_heads: int = 128
    q_latent_dim: int = 1536
    kv_latent_dim: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    mlp_dim: int = 18_432
    num_experts: int = 256
    top_k: int = 8
    expert_dim: int = 2048
    num_shared: int = 1
    scoring: Scoring = "sigmoid"
    groups: int = 8
    top_groups: int = 4
    routed_scale: float = 2.5
    balance_loss: float = 1e-4
    load_bias: bool = True
    capacity_factor: float = 0.0
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    def transformer(self) -> TransformerConfig:
        """The decoder these sizes describe."""
        attention = MlaConfig(
            num_heads=self.num_heads,
            q_latent_dim=self.q_latent_dim,
            kv_latent_dim=self.kv_latent_dim,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
        )
        normalize = self.scoring == "sigmoid"  # V2 takes the softmax over all experts as it is
        experts = MoeConfig(
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert_dim=self.expert_dim,
            shared_dim=self.num_shared * self.expert_dim,
            router=Router(self.scoring, normalize, self.groups, self.top_groups, self.routed_scale),
            balance_loss=self.balance_loss,
            load_bias=self.load_bias,
            capacity_factor=self.capacity_factor,
        )
        dense = Segment((BlockConfig(attention, MlpConfig(self.mlp_dim)),), self.dense_layers)
        sparse = Segment((BlockConfig(attention, experts),), self.num_layers - self.dense_layers)
        return TransformerConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            segments=(dense, sparse) if self.dense_layers else (sparse,),
            norm_eps=self.norm_eps,
            tie_embeddings=self.tie_embeddings,
        )
