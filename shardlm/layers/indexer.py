"""The indexer of sparse attention: light heads that score which tokens a query attends to, beside latent attention
(DeepSeek Sparse Attention, https://arxiv.org/abs/2512.02556, section 2.1). The choice itself is ops/token_choice.py's.

It takes no part in the loss: which tokens are the highest has no gradient, and what trains an indexer, the distance of
its scores from attention's, is not here. A checkpoint's indexer stays as it is while the rest is trained further, as in
`transformers`."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.lora import LoraConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.ops.rope import Rope, by_logarithm, rope, rope_of_tail
from shardlm.ops.token_choice import Index


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """num_heads, head_dim  of its queries; all share one key of each token
    top_k   tokens that a query attends to, itself included; all before it where there are no more
    rope    whose leading `dim` dimensions of a head are rotated, or, `of_tail`, whose last ones (Hy4); None: none are
    of_stream  queries are made of the stream, after this norm of it, and not of the queries' latent (Mistral Large 4)
    by_logarithm  they grow with their position (ops/rope.py)
    shared  the layer has no indexer and attends to what that of the last layer before it chose
            (https://arxiv.org/abs/2603.12201)
    """

    num_heads: int
    head_dim: int
    top_k: int
    rope: Rope | None
    norm: NormConfig = NormConfig("layer", 1e-6)
    shared: bool = False
    of_tail: bool = False
    of_stream: NormConfig | None = None
    by_logarithm: bool = False

    def __post_init__(self):
        if min(self.num_heads, self.head_dim, self.top_k) < 1:
            raise ShardlmError(
                f"an indexer of num_heads={self.num_heads}, head_dim={self.head_dim}, top_k={self.top_k}: each must be "
                "at least 1"
            )
        if self.rope:
            self.rope.check(self.head_dim)

    @property
    def kept_dim(self) -> int:
        """Numbers of a token that pages keep."""
        return self.head_dim

    @property
    def width(self) -> int:
        """Multiply-adds of a query and a key, to be attended to or not."""
        return 0 if self.shared else self.num_heads * (self.head_dim + 1)

    def parameters_per_token(self, embed_dim: int, q_latent_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        q_latent_dim = embed_dim if self.of_stream else q_latent_dim
        made = q_latent_dim * self.num_heads * self.head_dim + embed_dim * (self.head_dim + self.num_heads)
        return 0 if self.shared else made


class Indexer(nnx.Module):
    """Queries' latents and the stream -> Index; weights "wq" (Q, N, H), "wk" (D, H), "heads" (D, N), "k_norm" of H;
    where queries are of the stream "q_norm" of D, which is Q then, where they grow "growth" and "start" (N,).
    Each device has all heads: their scores are summed before tokens are chosen."""

    def __init__(self, config: IndexerConfig, embed_dim: int, q_latent_dim: int, params: Params):
        D, N, H = embed_dim, config.num_heads, config.head_dim
        Q = D if config.of_stream else q_latent_dim
        self.config = config
        params = dataclasses.replace(params, place=f"{params.place}indexer.", lora=LoraConfig())
        params.projection(self, "wq", (Q, N, H), ("latent", "index_heads", "head_dim"), normal(Q**-0.5))
        params.projection(self, "wk", (D, H), ("embed", "head_dim"), normal(D**-0.5))
        self.heads = params((D, N), ("embed", "index_heads"), normal(D**-0.5))  # too few to be worth few bits
        self.k_norm = Norm(config.norm, H, params)
        if config.of_stream:
            self.q_norm = Norm(config.of_stream, D, params)
        if config.by_logarithm:
            self.growth, self.start = (params((N,), ("index_heads",), constant(start)) for start in (0.0, 1.0))

    def __call__(
        self,
        latent: jax.Array | None,
        x: jax.Array,
        positions: jax.Array,
        execution: Execution,
        faster: jax.Array | None = None,
    ) -> Index:
        """latent [B, T, Q] of the queries after their norm, with the whole sequence, and x [B, T, D] with the sequence
        split as between blocks; positions int32 [B, T]. `faster`: factors on frequencies (ops/rope.py)."""
        config, whole = self.config, execution.rules.act.spec("batch", "whole_seq", None)
        latent, x, faster = jax.lax.stop_gradient((latent, x, faster))
        if config.of_stream:
            latent = jax.reshard(self.q_norm(x, execution), whole)
        plain = execution.plain
        q = project("btr,rnh->btnh", latent, self, "wq", plain)
        if config.by_logarithm:
            q = by_logarithm(q, positions, *(in_use(a, execution) for a in (self.growth, self.start)))
        q = self._turned(q, positions, faster)
        k = self.k_norm(project("btd,dh->bth", x, self, "wk", plain), execution)
        k = self._turned(jax.reshard(k, whole)[:, :, None], positions, faster)[:, :, 0]
        scale = (config.num_heads * config.head_dim) ** -0.5
        weights = jnp.einsum("btd,dn->btn", x, in_use(self.heads, execution), preferred_element_type=jnp.float32)
        weights = jax.reshard(weights * scale, whole)
        return Index(*(jax.lax.stop_gradient(a) for a in (q, weights, k)), count=config.top_k)

    def _turned(self, a: jax.Array, positions: jax.Array, faster: jax.Array | None) -> jax.Array:
        config = self.config
        if not config.rope:
            return a
        return rope_of_tail(a, positions, config.rope) if config.of_tail else rope(a, positions, config.rope, faster)
