"""Grouped-query attention: projections and rotary embedding around whatever the context attends to."""

import dataclasses

import jax
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.context import Context, Pages
from shardlm.layers.param import Execution, Params, normal, project
from shardlm.ops.rope import rope


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention (https://arxiv.org/abs/2305.13245). num_kv_heads = num_heads is multi-head. `window`
    is how many positions a token sees, itself included; 0: all before it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    window: int = 0

    def __post_init__(self):
        N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
        if K < 1 or N % K:
            divisors = ", ".join(str(d) for d in range(1, N + 1) if N % d == 0)
            raise ShardlmError(f"num_heads={N} is not a multiple of num_kv_heads={K}; choose kv heads from {divisors}")
        if H % 2:
            raise ShardlmError(f"head_dim={H} is odd; rotary embedding needs an even head_dim such as {H + 1}")

    @property
    def value_dim(self) -> int:
        """Of each head; queries and keys have head_dim."""
        return self.head_dim

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the four projections, each used once for a token."""
        return 2 * embed_dim * self.head_dim * (self.num_heads + self.num_kv_heads)


class Attention(nnx.Module):
    """x [B, T, D] -> [B, T, D]; weights "wq" (D, N, H), "wk" and "wv" (D, K, H), "wo" (N, H, D)."""

    def __init__(self, config: AttentionConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, K, H = embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.kv_name = kv_heads_name(K, N, params.rules.mesh.tensor)
        self.wq = params((D, N, H), ("embed", "heads", "head_dim"), normal(D**-0.5))
        self.wk = params((D, K, H), ("embed", self.kv_name, "head_dim"), normal(D**-0.5))
        self.wv = params((D, K, H), ("embed", self.kv_name, "head_dim"), normal(D**-0.5))
        self.wo = params((N, H, D), ("heads", "head_dim", "embed"), normal(out_scale * (N * H) ** -0.5))

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Per token and layer: entry name -> ((K, H), name of the K dimension)."""
        entry = ((self.config.num_kv_heads, self.config.head_dim), self.kv_name)
        return {"k": entry, "v": entry}

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, D] with the sequence split as between blocks, positions int32 [B, T]; returns (x's shape, pages)."""
        rules = execution.rules
        x = jax.reshard(x, rules.act.spec("batch", "whole_seq", "embed"))
        q = project("btd,dnh->btnh", x, self.wq, execution)
        k = project("btd,dkh->btkh", x, self.wk, execution)
        v = project("btd,dkh->btkh", x, self.wv, execution)
        q, k = rope(q, positions, self.config.rope_theta), rope(k, positions, self.config.rope_theta)
        options = {"scale": self.config.head_dim**-0.5, "window": self.config.window, "kv_name": self.kv_name}
        out, pages = ctx.attend(q, k, v, positions, pages, layer, **options)
        stream = rules.act.spec("batch", "seq", "embed")
        return project("btnh,nhd->btd", out, self.wo, execution, stream), pages


def kv_heads_name(num_kv_heads: int, num_heads: int, tensor: int) -> str:
    """The dimension name of the kv heads: split over the tensor axis where they divide, else whole on each device.

    Raises ShardlmError when neither works.
    """
    if num_kv_heads % tensor == 0:
        return "kv_heads"
    if tensor % num_kv_heads == 0 and num_heads % tensor == 0:
        return "kv_heads_whole"
    works = ", ".join(
        str(t)
        for t in range(1, num_heads + 1)
        if num_heads % t == 0 and (num_kv_heads % t == 0 or t % num_kv_heads == 0)
    )
    raise ShardlmError(
        f"heads={num_heads} and kv_heads={num_kv_heads} cannot be split over tensor={tensor}; "
        f"choose tensor from {works}"
    )
