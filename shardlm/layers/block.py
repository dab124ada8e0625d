"""One decoder block: attention and feed-forward, each behind a norm and around a residual."""

import dataclasses

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from shardlm.layers.attention import Attention, AttentionConfig
from shardlm.layers.context import Context, Pages
from shardlm.layers.mla import Mla, MlaConfig
from shardlm.layers.mlp import Mlp, MlpConfig
from shardlm.layers.moe import Moe, MoeConfig
from shardlm.layers.param import Execution, Params, constant, in_use
from shardlm.ops.norm import rms_norm


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    attention: AttentionConfig | MlaConfig
    mlp: MlpConfig | MoeConfig


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm, as in Llama: https://arxiv.org/abs/2302.13971)."""

    def __init__(self, config: BlockConfig, embed_dim: int, out_scale: float, norm_eps: float, params: Params):
        self.norm_eps = norm_eps
        self.attention_norm = params((embed_dim,), ("norm",), constant(1.0))
        attention = Mla if isinstance(config.attention, MlaConfig) else Attention
        self.attention = attention(config.attention, embed_dim, out_scale, params)
        self.mlp_norm = params((embed_dim,), ("norm",), constant(1.0))
        feed_forward = Moe if isinstance(config.mlp, MoeConfig) else Mlp
        self.mlp = feed_forward(config.mlp, embed_dim, out_scale, params)

    def __call__(
        self, x: jax.Array, positions: jax.Array, ctx: Context, pages: Pages | None, layer, execution: Execution
    ) -> tuple[jax.Array, Pages | None, dict[str, jax.Array]]:
        """x [B, T, D], positions int32 [B, T]; returns (x, pages, auxiliary values by name: none for a dense block)."""
        x = checkpoint_name(x, "block_input")
        h = rms_norm(x, in_use(self.attention_norm, execution), self.norm_eps)
        h, pages = self.attention(h, positions, ctx, pages, layer, execution)
        x = x + checkpoint_name(h, "attention_out")
        h = rms_norm(x, in_use(self.mlp_norm, execution), self.norm_eps)
        h, aux = self.mlp(h, ctx, execution)
        return x + checkpoint_name(h, "mlp_out"), pages, aux
