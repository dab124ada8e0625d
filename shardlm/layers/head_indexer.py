"""The indexer of attention whose kv heads attend to blocks of tokens of their own (MiniMax M3): a light head of queries
for each kv head, and a key of each token that all share. The choice itself is ops/head_choice.py's. It takes no part in
the loss, as layers/indexer.py's takes none."""

import dataclasses

import jax
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, normal, project
from shardlm.ops.head_choice import HeadIndex
from shardlm.ops.rope import Rope, rope


@dataclasses.dataclass(frozen=True)
class HeadIndexerConfig:
    """num_heads, head_dim  of its queries, one for each kv head; all share one key of each token
    blocks  that the queries of a kv head attend to
    block   tokens of one
    last    of those blocks are always the last ones, that of the query among them
    rope    whose leading `dim` dimensions of a head are rotated
    norm    of queries and keys
    """

    num_heads: int
    head_dim: int
    blocks: int
    block: int
    last: int
    rope: Rope
    norm: NormConfig

    shared = False  # each layer has its own

    def __post_init__(self):
        names = ("num_heads", "head_dim", "blocks", "block", "last")
        sizes = {name: getattr(self, name) for name in names}
        if min(sizes.values()) < 1 or self.blocks <= self.last:
            raise ShardlmError(
                f"an indexer of {', '.join(f'{name}={n}' for name, n in sizes.items())}: each must be at least 1, and "
                "blocks more than last"
            )
        self.rope.check(self.head_dim)

    @property
    def top_k(self) -> int:
        """Tokens that a query attends to at most, itself included."""
        return self.blocks * self.block

    @property
    def kept_dim(self) -> int:
        """Numbers of a token that pages keep."""
        return self.head_dim

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        return embed_dim * (self.num_heads + 1) * self.head_dim


class HeadIndexer(nnx.Module):
    """x [B, T, D] -> HeadIndex; weights "wq" (D, N, H), "wk" (D, H), "q_norm" and "k_norm" of H. Each device has all
    heads."""

    def __init__(self, config: HeadIndexerConfig, embed_dim: int, params: Params):
        D, N, H = embed_dim, config.num_heads, config.head_dim
        self.config = config
        params = dataclasses.replace(params, place=f"{params.place}indexer.", lora=LoraConfig())
        params.projection(self, "wq", (D, N, H), ("embed", "index_heads", "head_dim"), normal(D**-0.5))
        params.projection(self, "wk", (D, H), ("embed", "head_dim"), normal(D**-0.5))
        self.q_norm, self.k_norm = (Norm(config.norm, H, params) for _ in range(2))

    def __call__(self, x: jax.Array, turns: jax.Array, execution: Execution) -> HeadIndex:
        """x [B, T, D] with the whole sequence; turns int32 [B, T], or on three axes [B, T, 3]."""
        config, x = self.config, jax.lax.stop_gradient(x)
        plain = execution.plain
        q = self.q_norm(project("btd,dnh->btnh", x, self, "wq", plain), execution)
        k = self.k_norm(project("btd,dh->bth", x, self, "wk", plain), execution)
        q, k = rope(q, turns, config.rope), rope(k[:, :, None], turns, config.rope)[:, :, 0]
        q, k = jax.lax.stop_gradient((q, k))
        return HeadIndex(q, k, config.blocks - config.last, config.block, config.last)
