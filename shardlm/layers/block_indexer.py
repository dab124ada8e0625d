"""The indexer of attention to chosen blocks of tokens, beside attention to tokens (Qwen4-Exp's QSA): light heads that
score the blocks of a text. The choice itself is ops/block_choice.py's. It takes no part in the loss, as layers/
indexer.py's takes none."""

import dataclasses

import jax
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, in_use, normal, project
from shardlm.ops.block_choice import BlockIndex
from shardlm.ops.rope import Rope, rope


@dataclasses.dataclass(frozen=True)
class BlockIndexerConfig:
    """num_heads, head_dim  of its queries; all share one key of each block
    budget  tokens of the blocks that a query attends to
    block   tokens of one; those of a block that is not complete are attended to besides
    rope    whose leading `dim` dimensions of a head are rotated
    norm    of queries and of blocks' keys
    """

    num_heads: int
    head_dim: int
    budget: int
    block: int
    rope: Rope
    norm: NormConfig

    shared = False  # each layer has its own

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("num_heads", "head_dim", "budget", "block")}
        if min(sizes.values()) < 1 or self.budget % self.block:
            raise ShardlmError(
                f"an indexer of {', '.join(f'{name}={n}' for name, n in sizes.items())}: each must be at least 1, and "
                "budget a multiple of block"
            )
        self.rope.check(self.head_dim)

    @property
    def top_k(self) -> int:
        """Tokens that a query attends to at most, itself included."""
        return self.budget + self.block - 1

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        return embed_dim * (self.num_heads + 1) * self.head_dim


class BlockIndexer(nnx.Module):
    """x [B, T, D] -> BlockIndex; weights "wq" (D, N, H), "wk" (D, H), "q_norm" and "k_norm" of H. Each device has all
    heads: their scores are summed before blocks are chosen."""

    def __init__(self, config: BlockIndexerConfig, embed_dim: int, params: Params):
        D, N, H = embed_dim, config.num_heads, config.head_dim
        self.config = config
        params = dataclasses.replace(params, place=f"{params.place}indexer.", lora=LoraConfig())
        params.projection(self, "wq", (D, N, H), ("embed", "index_heads", "head_dim"), normal(D**-0.5))
        params.projection(self, "wk", (D, H), ("embed", "head_dim"), normal(D**-0.5))
        self.q_norm, self.k_norm = (Norm(config.norm, H, params) for _ in range(2))

    def __call__(self, x: jax.Array, turns: jax.Array, execution: Execution) -> BlockIndex:
        """x [B, T, D] with the whole sequence; turns int32 [B, T], or on three axes [B, T, 3]."""
        config, x = self.config, jax.lax.stop_gradient(x)
        plain = execution.plain
        q = self.q_norm(project("btd,dnh->btnh", x, self, "wq", plain), execution)
        k = project("btd,dh->bth", x, self, "wk", plain)
        scale = in_use(self.k_norm.scale, execution) + config.norm.offset
        q, k, scale = (jax.lax.stop_gradient(a) for a in (rope(q, turns, config.rope), k, scale))
        on_axes = turns if turns.ndim == 3 else None
        count = config.budget // config.block
        return BlockIndex(q, k, scale, config.norm.eps, config.rope, count, config.block, on_axes)
