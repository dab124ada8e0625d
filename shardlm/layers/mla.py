"""Multi-head latent attention: keys and values of all heads are made from one small latent of each token, and only the
latent is cached (https://arxiv.org/abs/2405.04434, section 2.1; https://arxiv.org/abs/2412.19437, eq. 1 to 11).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from shardlm.errors import ShardlmError
from shardlm.layers.context import INDEX, SELECTION, Context, Pages
from shardlm.layers.indexer import Indexer, IndexerConfig
from shardlm.layers.norm import Norm, NormConfig
from shardlm.layers.param import Execution, Params, constant, in_use, normal, project
from shardlm.layers.pooled_indexer import PooledIndexer, PooledIndexerConfig
from shardlm.ops.rope import QueryGrowth, Rope, by_logarithm, grown, rope


@dataclasses.dataclass(frozen=True)
class MlaConfig:
    """Sizes; the letters in brackets are the paper's.

    num_heads     heads (n_h)
    q_latent_dim  width of the queries' latent (d_c'); 0: queries straight from the stream
    kv_latent_dim width of the latent of keys and values (d_c), R in shapes
    nope_dim      of each head, the part without position (d_h)
    rope_dim      and the part with rotary embedding, whose key all heads share (d_h^R)
    rope          of that part; None: it is not turned either (Kimi Linear)
    value_dim     of each head
    scale         of the scores; 0: (nope_dim + rope_dim) ** -0.5
    query_growth  of queries by their position (ops/rope.py; Mistral 4)
    by_logarithm  queries grow with the logarithm of their position, as each head has learned (ops/rope.py)
    latent_scale  factor on the latent of keys and values behind its norm (LongCat Flash)
    room          numbers of a token in pages, where other layers have more than this one: zeros behind; 0: as it needs
    indexer       chooses the tokens that a query attends to (DeepSeek V3.2), or pools of them (GLM-5 Next); None: all
                  before it
    gate          each head's output is multiplied by the sigmoid of a projection of the stream, of one number a head
                  (Ling 3) or of as many as its values have (Hy4)
    sinks         each head has a learned score that takes weight from the tokens (Hy4; layers/attention.py)
    """

    num_heads: int
    q_latent_dim: int
    kv_latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: Rope | None = Rope()
    norm: NormConfig = NormConfig(eps=1e-6)
    scale: float = 0.0
    query_growth: QueryGrowth | None = None
    indexer: IndexerConfig | PooledIndexerConfig | None = None
    gate: Literal["none", "head", "number"] = "none"
    sinks: bool = False
    by_logarithm: bool = False
    room: int = 0
    latent_scale: float = 1.0

    def __post_init__(self):
        if self.rope:
            self.rope.check(self.rope_dim)
        if self.indexer and not self.q_latent_dim and not self.indexer.of_stream:
            raise ShardlmError("an indexer reads the queries' latent; q_latent_dim=0 has none")
        if self.room and self.room < self.kv_latent_dim + self.rope_dim:
            raise ShardlmError(f"room={self.room} is less than {self.kv_latent_dim + self.rope_dim}, which a token has")

    softcap = 0.0  # scores are as they are
    window = 0  # a token sees all before it

    @property
    def num_kv_heads(self) -> int:
        """Each head has its own keys and values, once they are made."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Of queries and keys."""
        return self.nope_dim + self.rope_dim

    def parameters_per_token(self, embed_dim: int) -> int:
        """Weights of the projections, each used once for a token."""
        N, Q, R = self.num_heads, self.q_latent_dim, self.kv_latent_dim
        queries = embed_dim * Q + Q * N * self.head_dim if Q else embed_dim * N * self.head_dim
        keys_values = embed_dim * (R + self.rope_dim) + R * N * (self.nope_dim + self.value_dim)
        chosen = self.indexer.parameters_per_token(embed_dim, Q) if self.indexer else 0
        return queries + keys_values + N * (self.value_dim + self.gates) * embed_dim + chosen

    @property
    def gates(self) -> int:
        """Numbers of a head's gate."""
        return {"none": 0, "head": 1, "number": self.value_dim}[self.gate]


class Mla(nnx.Module):
    """x [B, T, D] -> [B, T, D]; weights "wq" (D, N, H) or "wq_down" (D, Q) and "wq_up" (Q, N, H), "wkv_down"
    (D, R + rope), "wk_up" (R, N, nope), "wv_up" (R, N, value), "wo" (N, value, D), and the latents' norms; "indexer"
    where tokens are chosen, with a gate "wg" (D, N, value) or, of a head, (D, N, 1), with sinks "sinks" (N,),
    where queries grow with a logarithm "growth" and "start" (N,)."""

    def __init__(self, config: MlaConfig, embed_dim: int, out_scale: float, params: Params):
        D, N, Q, R, H = embed_dim, config.num_heads, config.q_latent_dim, config.kv_latent_dim, config.head_dim
        self.config = config
        heads = ("latent", "heads", "head_dim")
        if Q:
            params.projection(self, "wq_down", (D, Q), ("embed", "latent_whole"), normal(D**-0.5))
            self.q_norm = Norm(config.norm, Q, params)
            params.projection(self, "wq_up", (Q, N, H), heads, normal(Q**-0.5))
        else:
            params.projection(self, "wq", (D, N, H), ("embed", "heads", "head_dim"), normal(D**-0.5))
        params.projection(self, "wkv_down", (D, R + config.rope_dim), ("embed", "latent_whole"), normal(D**-0.5))
        self.kv_norm = Norm(config.norm, R, params)
        params.projection(self, "wk_up", (R, N, config.nope_dim), heads, normal(R**-0.5), both_ways=True)
        params.projection(self, "wv_up", (R, N, config.value_dim), heads, normal(R**-0.5), both_ways=True)
        out_init = normal(out_scale * (N * config.value_dim) ** -0.5)
        params.projection(self, "wo", (N, config.value_dim, D), ("heads", "head_dim", "embed"), out_init, into=2)
        if config.gates:
            shape = (D, N, config.gates)
            params.projection(self, "wg", shape, ("embed", "heads", "head_dim"), normal(D**-0.5))
        if config.by_logarithm:
            self.growth, self.start = (params((N,), ("heads",), constant(start)) for start in (0.0, 1.0))
        if config.sinks:
            self.sinks = params((N,), ("heads",), constant(0.0))
        if config.indexer and not config.indexer.shared:
            own = PooledIndexer if isinstance(config.indexer, PooledIndexerConfig) else Indexer
            self.indexer = own(config.indexer, D, Q, params)

    def cache_entries(self) -> dict[str, tuple[tuple[int, int], str]]:
        """Per token and layer: the latent and the shared key part, of which values are made too; the indexer's key."""
        width = self.config.room or self.config.kv_latent_dim + self.config.rope_dim
        found = {"k": ((1, width), "kv_heads_whole")}
        if self.config.indexer:  # of layers that share a choice too: all layers of a pool have the same room
            found[INDEX] = ((1, self.config.indexer.kept_dim), "kv_heads_whole")
        return found

    def __call__(self, x, positions, ctx: Context, pages: Pages | None, layer, execution: Execution):
        """x [B, T, D] with the sequence split as between blocks, positions int32 [B, T]; returns (x's shape, pages,
        the choice of tokens that later layers share)."""
        config, act = self.config, execution.rules.act
        q, q_rope, of_queries = self._queries(x, positions, ctx, execution)
        latent, k_rope = self._latents(x, positions, ctx, execution)
        attend = {"scale": config.scale or config.head_dim**-0.5, "window": 0}
        attend |= {"sinks": in_use(self.sinks, execution)} if config.sinks else {}
        selection = ctx.selection
        if config.indexer and not config.indexer.shared:
            index = self.indexer(of_queries, x, positions, execution, ctx.faster)
            selection, pages = ctx.select(index, positions, pages, layer)
        if config.indexer:
            attend["selection"] = selection
        kept = {} if ctx.selection is None else {SELECTION: selection}
        if ctx.absorbs:
            # Attention over the latents themselves: W_uk moves to the queries, W_uv to the output (section 2.1.2).
            if (T := x.shape[1]) & (T - 1):  # XLA's Triton finds no tiles of a product that begins with such a slice
                q = jax.lax.optimization_barrier(q)
            q = jnp.concatenate([project("btnh,rnh->btnr", q, self, "wk_up", execution), q_rope], axis=-1)
            k = jnp.concatenate([latent[:, :, None], k_rope], axis=-1)  # [B, T, 1, R + rope]
            if behind := config.room - k.shape[-1] if config.room else 0:
                q, k = (jnp.pad(a, ((0, 0), (0, 0), (0, 0), (0, behind))) for a in (q, k))
            attend |= {"kv_name": "kv_heads_whole", "value_dim": config.kv_latent_dim}
            out, pages = ctx.attend(q, k, None, positions, pages, layer, **attend)
            out = project("btnr,rnh->btnh", out, self, "wv_up", execution)
        else:
            shared = jnp.broadcast_to(
                k_rope, (*k_rope.shape[:2], config.num_heads, config.rope_dim),
                out_sharding=act.spec("batch", "whole_seq", "heads", "head_dim"),
            )  # fmt: skip
            k = jnp.concatenate([project("btr,rnh->btnh", latent, self, "wk_up", execution), shared], axis=-1)
            v = project("btr,rnh->btnh", latent, self, "wv_up", execution)
            q = jnp.concatenate([q, q_rope], axis=-1)
            out, pages = ctx.attend(q, k, v, positions, pages, layer, kv_name="kv_heads", **attend)
        if config.gates:
            out = out * jax.nn.sigmoid(project("btd,dnv->btnv", _whole(x, execution), self, "wg", execution))
        stream = act.spec("batch", "seq", "embed")
        return project("btnv,nvd->btd", out, self, "wo", execution, stream), pages, kept

    def _queries(self, x, positions, ctx: Context, execution: Execution):
        """(the part without position [B, T, N, nope], the rotated part [B, T, N, rope], their latent [B, T, Q])."""
        latent = None
        if self.config.q_latent_dim:
            latent = _whole(self.q_norm(self._down(x, "wq_down", execution), execution), execution)
            q = project("btr,rnh->btnh", latent, self, "wq_up", execution)
        else:
            q = project("btd,dnh->btnh", _whole(x, execution), self, "wq", execution)
        if self.config.query_growth:
            q = grown(q, positions, self.config.query_growth)
        if self.config.by_logarithm:
            q = by_logarithm(q, positions, *(in_use(a, execution) for a in (self.growth, self.start)))
        q, q_rope = jnp.split(q, [self.config.nope_dim], axis=-1)
        return q, self._turned(q_rope, positions, ctx), latent

    def _latents(self, x, positions, ctx: Context, execution: Execution):
        """(the normalised latent [B, T, R], the rotated key part that heads share [B, T, 1, rope])."""
        R = self.config.kv_latent_dim
        both = self._down(x, "wkv_down", execution)
        latent = self.kv_norm(both[..., :R], execution)
        latent = latent if self.config.latent_scale == 1 else latent * self.config.latent_scale
        both = _whole(jnp.concatenate([latent, both[..., R:]], axis=-1), execution)
        return both[..., :R], self._turned(both[:, :, None, R:], positions, ctx)

    def _turned(self, a: jax.Array, positions: jax.Array, ctx: Context) -> jax.Array:
        return rope(a, positions, self.config.rope, ctx.faster) if self.config.rope else a

    def _down(self, x, name: str, execution: Execution):
        """On each device's part of the sequence: the latent that is gathered afterwards is narrower than the stream."""
        return project("btd,dr->btr", x, self, name, execution)


def _whole(a: jax.Array, execution: Execution) -> jax.Array:
    """[B, T, x] with the sequence whole over the tensor axis."""
    return jax.reshard(a, execution.rules.act.spec("batch", "whole_seq", None))
