"""The indexer of attention to chosen pools of tokens, beside latent attention (GLM-5 Next; transformers'
modeling_glm5_next.py is the definition): DeepSeek Sparse Attention's light heads (layers/indexer.py) score one key for
every few tokens, which is theirs summed by learned weights. The choice itself is ops/block_choice.py's. It takes no
part in the loss, as layers/indexer.py's takes none."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, gathered, in_use, normal, project
from shardlm.ops.block_choice import PooledIndex


@dataclasses.dataclass(frozen=True)
class PooledIndexerConfig:
    """num_heads, head_dim  of its queries, which are made of attention's latent of queries; all share a pool's key
    budget  tokens of the pools that a query attends to
    block   tokens of one; those of a pool that is not complete are attended to besides
    norm    of tokens' keys
    """

    num_heads: int
    head_dim: int
    budget: int
    block: int
    norm: NormConfig = NormConfig("layer", 1e-6)

    shared = False  # each layer has its own
    of_stream = None  # queries are not made of the stream

    def __post_init__(self):
        sizes = {name: getattr(self, name) for name in ("num_heads", "head_dim", "budget", "block")}
        if min(sizes.values()) < 1 or self.budget % self.block:
            raise ShardlmError(
                f"an indexer of {', '.join(f'{name}={n}' for name, n in sizes.items())}: each must be at least 1, and "
                "budget a multiple of block"
            )

    @property
    def top_k(self) -> int:
        """Tokens that a query attends to at most, itself included."""
        return self.budget + self.block - 1

    @property
    def kept_dim(self) -> int:
        """Numbers of a token that pages keep: its key, and what it weighs in its pool's."""
        return 2 * self.head_dim

    def parameters_per_token(self, embed_dim: int, q_latent_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        return q_latent_dim * self.num_heads * self.head_dim + embed_dim * (2 * self.head_dim + self.num_heads)


class PooledIndexer(nnx.Module):
    """Queries' latents and the stream -> PooledIndex; weights "wq" (Q, N, H), "wk" and "wgate" (D, H), "heads" (D, N),
    "k_norm" of H, and "bias" (block, H) of a token's place in its pool. Each device has all heads: their scores are
    summed before pools are chosen."""

    def __init__(self, config: PooledIndexerConfig, embed_dim: int, q_latent_dim: int, params: Params):
        D, Q, N, H = embed_dim, q_latent_dim, config.num_heads, config.head_dim
        self.config = config
        params = dataclasses.replace(params, place=f"{params.place}indexer.", lora=LoraConfig())
        params.projection(self, "wq", (Q, N, H), ("latent", "index_heads", "head_dim"), normal(Q**-0.5))
        for name in ("wk", "wgate"):
            params.projection(self, name, (D, H), ("embed", "head_dim"), normal(D**-0.5))
        self.heads = params((D, N), ("embed", "index_heads"), normal(D**-0.5))  # too few to be worth few bits
        self.k_norm = Norm(config.norm, H, params)
        self.bias = params((config.block, H), ("norm", "norm"), constant(0.0))

    def __call__(
        self,
        latent: jax.Array,
        x: jax.Array,
        positions: jax.Array,
        execution: Execution,
        faster: jax.Array | None = None,
    ) -> PooledIndex:
        """latent [B, T, Q] of the queries after their norm, with the whole sequence, and x [B, T, D] with the sequence
        split as between blocks. Nothing is rotated: positions and `faster` are others'."""
        del positions, faster
        config, whole = self.config, execution.rules.act.spec("batch", "whole_seq", None)
        latent, x = jax.lax.stop_gradient((latent, x))
        plain = execution.plain
        q = project("btr,rnh->btnh", latent, self, "wq", plain)
        k = self.k_norm(project("btd,dh->bth", x, self, "wk", plain), execution)
        both = jnp.concatenate([k, project("btd,dh->bth", x, self, "wgate", plain)], axis=-1)
        weights = jnp.einsum("btd,dn->btn", x, in_use(self.heads, execution), preferred_element_type=jnp.float32)
        weights = weights * (config.num_heads * config.head_dim) ** -0.5
        made = q, jax.reshard(both, whole), gathered(self, "bias", execution), jax.reshard(weights, whole)
        q, both, bias, weights = (jax.lax.stop_gradient(a) for a in made)
        return PooledIndex(q, both, bias, config.budget // config.block, config.block, weights)
