"""Gated short convolutions, which LFM2 has in most layers in place of attention (https://arxiv.org/abs/2511.23404,
section 2.1): each number of a token is mixed with the same of a few tokens before it, between two gates. What it
remembers of a text is those tokens, in the slots that linear attention has for its states (layers/delta_net.py)."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.layers.context import CONVOLVED, MEMORIES, Context, Pages
from shardlm.layers.delta_net import DeltaNetConfig
from shardlm.layers.param import Execution, Params, in_use, normal, project


@dataclasses.dataclass(frozen=True)
class ShortConvConfig(DeltaNetConfig):
    """A configuration of linear attention without a state: num_heads parts of value_dim numbers each, by which devices
    split them, and as many of what gates what is convolved."""

    @classmethod
    def of(cls, num_heads: int, head_dim: int, conv_width: int) -> "ShortConvConfig":
        return cls(num_heads, num_heads, head_dim, head_dim, conv_width)

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        return 4 * embed_dim * self.num_heads * self.value_dim

    def macs_per_token(self) -> int:
        """None: there is no state, and convolutions are not counted (flops.py)."""
        return 0


class ShortConv(nnx.Module):
    """(x wg * conv(x wk * x wv)) wo, x [B, T, D] -> [B, T, D]; weights "wk", "wv" and "wg" (D, N, V), "wo" (N, V, D)
    and "taps_v" (N, V, W)."""

    def __init__(self, config: ShortConvConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, V, W = embed_dim, config.num_heads, config.value_dim, config.conv_width
        self.config = config
        for name in ("wk", "wv", "wg"):
            params.projection(self, name, (D, N, V), ("embed", "heads", "head_dim"), normal(D**-0.5))
        out_init = normal(out_scale * (N * V) ** -0.5)
        params.projection(self, "wo", (N, V, D), ("heads", "head_dim", "embed"), out_init, into=2)
        self.taps_v = params((N, V, W), ("heads", "head_dim", "norm"), normal(W**-0.5))

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Nothing is kept of each token."""
        return {}

    def memory_entries(self, dtype: jnp.dtype, unsure: int = 0) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Of each text, as DeltaNet.memory_entries has it: the tokens that the next ones see, gated."""
        config = self.config
        found = {CONVOLVED: ((config.conv_width - 1 + unsure, config.num_heads, config.value_dim), jnp.dtype(dtype))}
        found |= {"start": ((), jnp.dtype(jnp.int32))} if unsure else {}
        assert found.keys() <= MEMORIES.keys()
        return found

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, D] with the sequence split as between blocks, positions int32 [B, T]; returns (x's shape, pages,
        {})."""
        act = execution.rules.act
        x = jax.reshard(x, act.spec("batch", "whole_seq", "embed"))
        before, value, after = (project("btd,dnv->btnv", x, self, name, execution) for name in ("wk", "wv", "wg"))
        mixed, pages = ctx.convolve_heads(before * value, in_use(self.taps_v, execution), positions, pages, layer)
        stream = act.spec("batch", "seq", "embed")
        return project("btnv,nvd->btd", after * mixed, self, "wo", execution, stream), pages, {}
